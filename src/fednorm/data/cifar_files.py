"""The files that CIFAR comes in: the binary version, and the pickles of torchvision and Keras."""

import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fednorm.data.archive import member
from fednorm.data.store import Arrays, DamagedDataError

Split: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]
Names: TypeAlias = Sequence[str]  # of files; the last one is the test split

SIDE = 32
_PIXELS = 3 * SIDE * SIDE
_RECONSTRUCT = np.empty(0).__reduce__()[0]  # numpy's own function, under any of its addresses
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def binary_archive(path: Path, names: Names, labels: int = 1) -> Arrays:
    """Return the images of the original archive; each follows so many labels, the last is used."""
    with tarfile.open(path) as archive:
        return _joined(names, lambda name: _binary(member(archive, name), labels))


def binary_folder(path: Path, names: Names, labels: int = 1) -> Arrays:
    """Return the images of the archive's folder, unpacked."""
    return _joined(names, lambda name: _binary((path / name).read_bytes(), labels))


def pickled_folder(path: Path, sums: Mapping[str, str], key: bytes) -> Arrays:
    """Return the images of a folder of pickles, which must have the published MD5.

    Args:
        path: the folder.
        sums: the MD5 of every file; the last one is the test split.
        key: under which the labels are found.
    """
    return _joined(list(sums), lambda name: _pickled(path / name, sums[name], key))


def checked(path: Path, md5: str) -> Path:
    """Return the path of a file that has this MD5."""
    came = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if came != md5:
        raise DamagedDataError(f"{path.name} has MD5 {came}, but must have {md5}")
    return path


def _joined(names: Names, read: Callable[[str], Split]) -> Arrays:
    *train, (x_test, y_test) = [read(name) for name in names]
    x, y = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def _binary(data: bytes, labels: int) -> Split:
    if not data or len(data) % (labels + _PIXELS):
        raise DamagedDataError(f"{len(data)} bytes are no rows of {labels + _PIXELS}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, labels + _PIXELS)
    return rows[:, labels:].reshape(-1, 3, SIDE, SIDE), rows[:, labels - 1]


def _pickled(path: Path, md5: str, key: bytes) -> Split:
    batch = read_pickle(checked(path, md5).read_bytes())
    return batch[b"data"].reshape(-1, 3, SIDE, SIDE), np.array(batch[key], np.uint8)


def read_pickle(data: bytes) -> Any:
    """Return what a pickle holds, if it is made of plain values and numpy arrays alone.

    A pickle can name any function to be called; one that names another than those that make
    an array is refused before anything is called.
    """
    return _Restricted(io.BytesIO(data), encoding="bytes").load()


class _Restricted(pickle.Unpickler):
    """Knows the names that make a numpy array, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DamagedDataError(
                f"the pickle asks for {module}.{name}, which no array needs; it may be harmful "
                "and is not read"
            )
        return _ALLOWED[module, name]
