"""Pictures of one size out of pictures of any size."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fednorm.data.pictures import Decode, Decoder, Picture


def square(size: int | None, channels: int = 3) -> Decoder:
    """Return the decoder that resizes the short side to `size` and cuts the middle out.

    Without a size, pictures are left as large as they are.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 pixel, but is {size}.")
    return Decoder(lambda path: _of_file(path, size, channels), f"square {size} {channels}")


def _of_file(path: Path, size: int | None, channels: int) -> Picture:
    with Image.open(path) as picture:
        if size is not None:  # a large JPEG is read at a fraction of its size, at least twice ours
            picture.draft(None, (2 * size, 2 * size))
        return as_array(picture, size, channels)


def as_array(picture: Image.Image, size: int | None, channels: int) -> Picture:
    """Return a picture as channels x height x width, its middle if a size is asked for."""
    converted = picture.convert("RGB" if channels == 3 else "L")  # noqa: PLR2004 (red, green, blue)
    if size is not None and converted.size != (size, size):
        converted = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if array.ndim > 2 else array[None]  # noqa: PLR2004


def stretched(size: tuple[int, int]) -> Decode:
    """Return the function that resizes a picture to height and width, colours interpolated."""
    height, width = size

    def decode(path: Path) -> Picture:
        with Image.open(path) as picture:
            resized = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))

    return decode
