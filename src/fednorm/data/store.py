"""Decoded data on disk: one .npy file an array, and an index with their checksums.

A folder is written under another name and renamed when it is whole, so that what was interrupted
is never used. Arrays beyond the memory limit are mapped from their files.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fednorm.data import cache

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

INDEX = "index.json"
_CHUNK = 1 << 24


class DamagedDataError(ValueError):
    """Data that are not what their checksum says."""


def digest(array: NDArray[Any]) -> str:
    """Return the SHA-256 of an array's values in row order.

    >>> digest(np.zeros(0, np.uint8))[:8]
    'e3b0c442'
    """
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    result = hashlib.sha256()
    for start in range(0, len(values), _CHUNK):
        result.update(values[start : start + _CHUNK].data)
    return result.hexdigest()


def stored(folder: Path, write: Callable[[Path], None]) -> Arrays:
    """Return the arrays of a folder; if it is not there or damaged, `write` makes them first."""
    if (arrays := _whole(folder)) is not None:
        return arrays
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # runs side by side need the same data
        if _whole(folder) is None:
            _replace(folder, write)
    return opened(folder)


def _whole(folder: Path) -> Arrays | None:
    cache.limit()  # a mistake there is no damage
    try:
        return opened(folder)
    except (OSError, ValueError, LookupError, EOFError, AttributeError):  # absent, or damaged
        return None


def save(folder: Path, arrays: Arrays) -> None:
    """Write arrays, one file each."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def opened(folder: Path) -> Arrays:
    """Return the arrays of a folder, checked; those beyond the memory limit only by their size."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    large = sum(entry["bytes"] for entry in index.values()) > cache.limit()
    # Copy-on-write, because torch warns of arrays that cannot be written.
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="c" if large and entry["large"] else None)
        for name, entry in index.items()
    }
    for name, entry in index.items():
        mapped = isinstance(arrays[name], np.memmap)
        if arrays[name].nbytes != entry["bytes"] or (
            not mapped and digest(arrays[name]) != entry["sha256"]
        ):
            raise DamagedDataError(f"{folder / name}.npy is not what was written.")
    return arrays


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder anew and put it in the place of what was there."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        fresh.mkdir()
        write(fresh)
        _seal(fresh)
        if folder.exists():
            if not (folder / INDEX).exists():
                raise DamagedDataError(
                    f"{str(folder)!r} is in the way of a decoded data set and is not one; move it."
                )
            folder.rename(old)
        fresh.rename(folder)


def _seal(folder: Path) -> None:
    """Write the index of all arrays in a folder, after everything has reached the disk."""
    index = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r")
        index[path.stem] = {
            "sha256": digest(array),
            "bytes": array.nbytes,
            "large": array.ndim > 1,
        }
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
