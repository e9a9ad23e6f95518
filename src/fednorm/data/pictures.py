"""Picture files become arrays of bytes: read side by side, and kept for the next time."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image

from fednorm.data.cache import decoded_home
from fednorm.data.progress import Advance, bar
from fednorm.data.store import Arrays, DamagedDataError, save, stored

Picture: TypeAlias = NDArray[np.uint8]
Decode: TypeAlias = Callable[[Path], Picture]

_AT_ONCE = 4096  # files handed to the threads; their results go straight to disk


@dataclass(frozen=True, slots=True)
class Files:
    """The pictures of one split, and what is known of them.

    Attributes:
        paths: the picture files.
        labels: the class of each; if every pixel has one, the files of the masks.
        groups: the natural group of each, if they have one.
    """

    paths: list[Path]
    labels: NDArray[np.int64] | list[Path]
    groups: NDArray[Any] | None = None

    def take(self, numbers: NDArray[np.int64]) -> "Files":
        """Return some of the pictures."""
        labels = self.labels
        return Files(
            [self.paths[i] for i in numbers],
            [labels[i] for i in numbers] if isinstance(labels, list) else labels[numbers],
            None if self.groups is None else self.groups[numbers],
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    """How pictures and masks are read; `settings` tells apart what differs in the result."""

    picture: Decode
    settings: str
    mask: Decode | None = None


def decoded(name: str, train: Files, test: Files, decoder: Decoder) -> Arrays:
    """Return the arrays of both splits, decoded now or the last time the same was asked for."""
    key = fingerprint([train, test], decoder.settings)

    def write(folder: Path) -> None:
        for files, end in ((train, ""), (test, "_test")):
            _write_split(folder, files, end, decoder)

    return stored(decoded_home() / name / key, write)


def fingerprint(splits: Iterable[Files], settings: str) -> str:
    """Return what changes with any file's name, size, time of change or label, or the settings."""
    result = hashlib.sha256(settings.encode())
    for files in splits:
        labels = files.labels
        own = [_facts(p) for p in labels] if isinstance(labels, list) else labels.tolist()
        groups = [""] * len(own) if files.groups is None else files.groups.tolist()
        for path, label, group in zip(files.paths, own, groups, strict=True):
            result.update(f"{_facts(path)}|{label}|{group}\n".encode())
        result.update(b"\n")
    return result.hexdigest()[:16]


def _facts(path: Path) -> str:
    facts = path.stat()
    return f"{path}|{facts.st_size}|{facts.st_mtime_ns}"


def _write_split(folder: Path, files: Files, end: str, decoder: Decoder) -> None:
    _write_pictures(folder / f"x{end}.npy", files.paths, decoder.picture)
    if isinstance(files.labels, list):
        if decoder.mask is None:
            raise TypeError("labels that are files need a decoder with a mask.")
        _write_pictures(folder / f"y{end}.npy", files.labels, decoder.mask)
    else:
        save(folder, {f"y{end}": files.labels})
    if files.groups is not None:
        save(folder, {f"groups{end}": files.groups})


def _write_pictures(target: Path, paths: list[Path], decode: Decode) -> None:
    """Decode pictures into one file; the threads write to different rows."""
    shape = (len(paths), *_read(paths[0], decode).shape)
    rows = open_memmap(target, "w+", np.uint8, shape)

    def one(number: int) -> None:
        picture = _read(paths[number], decode)
        if picture.shape != shape[1:]:
            raise DamagedDataError(
                f"pictures must be of one size, but {paths[number]} has shape {picture.shape} "
                f"and {paths[0]} has {shape[1:]}; set the data set's size."
            )
        rows[number] = picture

    with bar(f"decoding {len(paths)} pictures", len(paths)) as advance:
        _in_threads(one, len(paths), advance)
    rows.flush()


def _in_threads(work: Callable[[int], None], count: int, advance: Advance) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, count, _AT_ONCE):
            for _ in pool.map(work, range(start, min(start + _AT_ONCE, count))):
                advance(1)


def _read(path: Path, decode: Decode) -> Picture:
    try:
        return decode(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedDataError(
            f"the picture {path} cannot be read: {error}; replace it by a whole copy or remove it."
        ) from error
