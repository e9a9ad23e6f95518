"""The ways to get a data set, tried in order; if all fail, one error tells what was tried."""

import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from fednorm.data.cache import home
from fednorm.data.store import Arrays

# What a file that is not there, or is damaged, can raise.
_DAMAGED = (
    EOFError,
    LookupError,
    tarfile.TarError,
    zipfile.BadZipFile,
    pickle.PickleError,
    zlib.error,
)
_UNUSABLE = (OSError, ValueError, *_DAMAGED)


class MissingDataError(OSError):
    """A data set that is neither here nor to be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Way:
    """One place to get a data set from; `get` raises an error that tells the reason."""

    place: str
    get: Callable[[], Arrays]


def first(name: str, ways: Iterable[Way], files: str, check: Callable[[Arrays], None]) -> Arrays:
    """Return what the first way that works gives.

    Args:
        name: the data set.
        ways: where to look, in order.
        files: the files that a user can put in place by hand.
        check: raises an error if what came is not what it should be.
    """
    tried = []
    for way in ways:
        try:
            arrays = way.get()
            check(arrays)
        except _UNUSABLE as error:
            tried.append(f"- {way.place}: {error or type(error).__name__}")
        else:
            return arrays
    raise MissingDataError(
        f"data set {name!r} is not here and could not be fetched. Tried:\n"
        + "\n".join(tried)
        + f"\nPut {files} into {home()}, or set the data set's root to the folder that holds it."
    )


def copies(
    folders: Iterable[Path], readers: Mapping[str, Callable[[Path], Arrays]]
) -> Iterator[Way]:
    """Yield a way for every copy on this machine, in the layouts that `readers` can read.

    Args:
        folders: where to look.
        readers: for a path below a folder, the function that reads it.
    """
    for folder in folders:
        found = [below for below in readers if (folder / below).exists()]
        for below in found:
            yield Way(str(folder / below), partial(readers[below], folder / below))
        if not found:
            yield Way(f"folder {folder}", partial(_absent, list(readers)))


def _absent(layouts: list[str]) -> NoReturn:
    raise FileNotFoundError(f"has no {', '.join(layouts)}")
