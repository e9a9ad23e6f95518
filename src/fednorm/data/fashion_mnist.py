"""Fashion-MNIST: 70 000 pictures of clothes, 28x28 pixels, in 10 classes.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms" (2017), arXiv:1708.07747. A copy of torchvision or Keras, or Debian's package
`dataset-fashion-mnist`, is used if there is one; else the four files are downloaded. Whatever the
way, the arrays must have the SHA-256 given here, which is that of Debian's package.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fednorm.data.idx_files import SHAPES, from_mirror, idx_folder
from fednorm.data.known import Known
from fednorm.data.ways import Way, copies

MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)
MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
DEBIAN = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class FashionMnist(Known):
    """Pictures of clothes, 28x28 pixels, 60 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "fashion_mnist"
    classes: ClassVar[int] = 10
    shapes: ClassVar[dict[str, tuple[int, ...]]] = SHAPES
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    files: ClassVar[str] = "a folder FashionMNIST/raw with the four files *-ubyte.gz"
    sources: ClassVar[tuple[str, ...]] = ("fashion-mnist.s3", "tf-keras-datasets", "Debian")
    sums: ClassVar[dict[str, str]] = {
        "x": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "y": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "x_test": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "y_test": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    }

    def copies(self, folders: list[Path]) -> Iterator[Way]:
        """Yield the files of torchvision, Keras and Debian, or the four files in a folder."""
        return copies(
            folders if self.root is not None else [*folders, DEBIAN],
            {
                "FashionMNIST/raw": idx_folder,
                "fashion-mnist": idx_folder,
                "train-images-idx3-ubyte": lambda path: idx_folder(path.parent),
                "train-images-idx3-ubyte.gz": lambda path: idx_folder(path.parent),
            },
        )

    def remote(self, scratch: Path) -> Iterator[Way]:
        """Yield the mirrors."""
        for mirror in MIRRORS:
            yield Way(mirror, partial(from_mirror, mirror, MD5, scratch))
