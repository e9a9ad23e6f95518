"""Load a saved model in plain torch, without Flower, and classify images.

Run it with `python predict.py MODEL IMAGE...`; the model is one of the files that the app saved.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from hospital.task import build_model, normalize
from PIL import Image
from safetensors.torch import load_file

CLASSES, SIZE = "healthy,lesion", 64


def predict(path: Path, images: list[Path]) -> list[str]:
    """Return the class of each image."""
    model = build_model({"classes": CLASSES, "image-size": SIZE, "weights": ""})
    model.load_state_dict(load_file(path))
    read = [Image.open(image).convert("RGB").resize((SIZE, SIZE)) for image in images]
    x = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in read])
    with torch.no_grad():
        found = model.eval()(normalize(x)).argmax(1)
    return [CLASSES.split(",")[number] for number in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify images.")
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, nargs="+")
    given = parser.parse_args()
    for image, name in zip(given.images, predict(given.model, given.images), strict=True):
        print(image, name)
