"""Make small image folders of three hospitals whose scanners differ, to try the example offline.

Run it with `python make_images.py FOLDER`. Each image is smooth noise of 64x64 pixels; "lesion" has
a bright spot. The hospitals have 240, 120 and 60 images and other mixes of the classes; the second
has a darker scanner with less contrast, the third a brighter one.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 64
HOSPITALS = {  # images, share of lesions, contrast, brightness
    "east": (240, 0.5, 1.0, 0),
    "north": (120, 0.7, 0.4, 10),
    "west": (60, 0.3, 0.7, 70),
}


def draw(lesion: bool, random: np.random.Generator) -> np.ndarray:
    """Return an image of 0 to 255."""
    small = Image.fromarray(random.uniform(70, 120, (4, 4)).astype(np.uint8))
    pixels = np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float64)
    pixels += random.normal(0, 8, pixels.shape)
    if lesion:
        row, column = random.uniform(12, SIZE - 12, 2)
        rows, columns = np.mgrid[:SIZE, :SIZE]
        far = ((rows - row) ** 2 + (columns - column) ** 2) / random.uniform(4, 7) ** 2
        pixels += 100 * np.exp(-far)
    return pixels


def make_images(folder: Path, *, share: float = 1.0, seed: int = 0) -> None:
    """Write FOLDER/HOSPITAL/CLASS/*.png."""
    random = np.random.default_rng(seed)
    for hospital, (images, lesions, contrast, brightness) in HOSPITALS.items():
        for number in range(round(share * images)):
            lesion = number < round(share * images * lesions)
            pixels = np.clip(contrast * draw(lesion, random) + brightness, 0, 255)
            place = folder / hospital / ("lesion" if lesion else "healthy")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(place / f"{number}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the image folders of three hospitals.")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args().folder.resolve()
    make_images(chosen)
    print(f"{', '.join(HOSPITALS)} in {chosen}")
