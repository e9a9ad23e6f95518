"""The files that MNIST and its kin come in: four in the format idx, or one of Keras."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fednorm.data.fetch import download
from fednorm.data.store import Arrays, DamagedDataError

Read: TypeAlias = Callable[[str], bytes]  # from a file's name to its content

FILES = {
    "x": "train-images-idx3-ubyte",
    "y": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
SHAPES: dict[str, tuple[int, ...]] = {"x": (60_000, 1, 28, 28), "x_test": (10_000, 1, 28, 28)}
_BYTES = 8  # the code of unsigned bytes in an idx file


def idx(read: Read) -> Arrays:
    """Return images and labels of the four files."""
    return _with_channel({key: parse_idx(read(name)) for key, name in FILES.items()})


def idx_folder(path: Path) -> Arrays:
    """Return images and labels of a folder that holds the four files, compressed or not."""
    return idx(lambda name: _plain_or_compressed(path / name))


def keras_file(path: Path) -> Arrays:
    """Return images and labels of Keras's `mnist.npz`."""
    names = {"x": "x_train", "y": "y_train", "x_test": "x_test", "y_test": "y_test"}
    with np.load(path, allow_pickle=False) as stored:
        return _with_channel({key: stored[name] for key, name in names.items()})


def from_mirror(mirror: str, sums: dict[str, str], scratch: Path) -> Arrays:
    """Return the arrays of the four compressed files below a URL."""

    def read(name: str) -> bytes:
        path = download(f"{mirror}/{name}.gz", scratch, sums[name])
        return gzip.decompress(path.read_bytes())

    return idx(read)


def parse_idx(data: bytes) -> NDArray[np.uint8]:
    """Return the array of an idx file of unsigned bytes.

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


def _plain_or_compressed(path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    try:
        with gzip.open(path.with_name(f"{path.name}.gz")) as file:
            return file.read()
    except EOFError as error:
        raise DamagedDataError(f"{path.name}.gz is cut short") from error


def _with_channel(arrays: dict[str, NDArray[Any]]) -> Arrays:
    return arrays | {key: arrays[key][:, None] for key in ("x", "x_test")}
