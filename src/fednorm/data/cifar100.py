"""CIFAR-100: 60 000 photographs of 32x32 pixels in 100 classes.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). The fine labels are
used. A copy of torchvision or of the original archive is used if there is one; else the original
archive is downloaded. Archive and pickles must have their published MD5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fednorm.data.cifar_files import SIDE, binary_archive, binary_folder, checked, pickled_folder
from fednorm.data.fetch import download
from fednorm.data.known import Known
from fednorm.data.store import Arrays
from fednorm.data.ways import Way, copies

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
MD5 = "03b5dce01913d631647c71ecec9e9cb8"
FOLDER = "cifar-100-binary"
BINARY = ["train.bin", "test.bin"]
PICKLES = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


@dataclass(frozen=True, slots=True)
class Cifar100(Known):
    """Photographs of 32x32 pixels in 100 classes, 50 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "cifar100"
    classes: ClassVar[int] = 100
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "x": (50_000, 3, SIDE, SIDE),
        "x_test": (10_000, 3, SIDE, SIDE),
    }
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    files: ClassVar[str] = "cifar-100-binary.tar.gz"
    sources: ClassVar[tuple[str, ...]] = ("cs.toronto.edu",)
    sums: ClassVar[dict[str, str]] = {}  # none is published for the arrays

    def copies(self, folders: list[Path]) -> Iterator[Way]:
        """Yield the original archive, packed or not, and the pickles of torchvision and Keras."""
        pickles = partial(pickled_folder, sums=PICKLES, key=b"fine_labels")
        return copies(
            folders,
            {
                FOLDER: partial(binary_folder, names=BINARY, labels=2),
                self.files: from_archive,
                "cifar-100-python": pickles,
                "cifar-100-python-target/cifar-100-python": pickles,  # Keras 3
            },
        )

    def remote(self, scratch: Path) -> Iterator[Way]:
        """Yield the original archive."""
        yield Way(URL, lambda: from_archive(download(URL, scratch, MD5)))


def from_archive(path: Path) -> Arrays:
    """Return CIFAR-100 out of the original archive, in which a coarse label precedes the fine."""
    return binary_archive(checked(path, MD5), [f"{FOLDER}/{name}" for name in BINARY], labels=2)
