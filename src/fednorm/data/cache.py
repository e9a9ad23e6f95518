"""The cache of decoded data on disk: its folders, its checksums, and its limit of memory.

A data set is a folder with one .npy file per array and an index of their checksums. The folder is
written under a temporary name and renamed when complete, so that a partial write is never read.
Arrays beyond the memory limit are mapped from their files.
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

from fednorm.errors import DamagedDataError

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

INDEX = "index.json"
_GIGABYTE = 10**9
_DEFAULT_LIMIT = 4.0


def get_home() -> Path:
    """Return the folder of all data sets: `FEDNORM_DATA`, or `fednorm` in the user's cache."""
    if chosen := os.environ.get("FEDNORM_DATA"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "fednorm"


def get_decoded_home() -> Path:
    """Return the folder of decoded data, which holds no files of the user."""
    return get_home() / "decoded"


def list_roots(root: str | None) -> list[Path]:
    """Return the folders to search for a copy: `root` alone if it is given."""
    if root is not None:
        return [Path(root).expanduser()]
    return [get_home(), Path("data"), Path.home() / ".keras" / "datasets"]


def get_memory_limit() -> float:
    """Return the limit of a data set in bytes; a larger one is mapped from its files."""
    text = os.environ.get("FEDNORM_DATA_LIMIT", str(_DEFAULT_LIMIT))
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise ValueError(
            f"FEDNORM_DATA_LIMIT must be a number of gigabytes such as {_DEFAULT_LIMIT:g}, "
            f"but is {text!r}."
        )
    return gigabytes * _GIGABYTE


def digest(array: NDArray[Any]) -> str:
    """Return the SHA-256 of an array's values in row order.

    >>> digest(np.zeros(0, np.uint8))[:8]
    'e3b0c442'
    """
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def make_key(facts: object) -> str:
    """Return a short name for decoded data, by what they were decoded from."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def load_or_create(folder: Path, write: Callable[[Path], None]) -> Arrays:
    """Return the arrays of `folder`; call `write` first if it is missing or damaged."""
    if (arrays := _open_if_whole(folder)) is not None:
        return arrays
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # concurrent runs need the same data
        if _open_if_whole(folder) is None:
            _replace(folder, write)
    return open_cached(folder)


def _open_if_whole(folder: Path) -> Arrays | None:
    get_memory_limit()  # an invalid limit does not mean damaged data
    try:
        return open_cached(folder)
    except (OSError, ValueError, LookupError, EOFError, AttributeError):  # absent, or damaged
        return None


def save(folder: Path, arrays: Arrays) -> None:
    """Write one file per array."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def open_cached(folder: Path) -> Arrays:
    """Open and check the arrays of a folder; of mapped ones check only the size."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    large = sum(entry["bytes"] for entry in index.values()) > get_memory_limit()
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
            raise DamagedDataError(f"{folder / name}.npy has changed since it was written.")
    return arrays


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a new folder and replace the old one by it."""
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
    """Flush all arrays of a folder to disk, then write their index."""
    index = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r")
        index[path.stem] = {"sha256": digest(array), "bytes": array.nbytes, "large": array.ndim > 1}
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
