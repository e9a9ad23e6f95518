"""Data sets of image files: find the files, decode the chosen ones, and cache the arrays.

Files are chosen by name before any is read. Threads decode them, and the arrays are cached under a
fingerprint of the files and the decoder's settings.
"""

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image

from fednorm.data.cache import Arrays, get_decoded_home, get_home, list_roots, load_or_create, save
from fednorm.data.dataset import Dataset
from fednorm.data.decoder import Decode, Decoder, ImageArray
from fednorm.data.image_dataset import ImageDataset, make_dataset
from fednorm.data.sources import show_progress
from fednorm.data.transforms import BatchTransform
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.registry import param
from fednorm.system import count_cores

log = logging.getLogger("fednorm")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
_SHOWN = 5  # names in a message
_AT_ONCE = 4096  # files queued for the threads, which write their results straight to disk


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The image files of one split, with their labels and groups.

    Attributes:
        paths: the image files.
        labels: the class of each image; for segmentation, the mask files.
        groups: the natural group of each image, if known.
    """

    paths: list[Path]
    labels: NDArray[np.int64] | list[Path]
    groups: NDArray[Any] | None = None

    def take(self, numbers: NDArray[np.int64]) -> "ImageFiles":
        """Return the images at the indices `numbers`."""
        labels = self.labels
        return ImageFiles(
            [self.paths[i] for i in numbers],
            [labels[i] for i in numbers] if isinstance(labels, list) else labels[numbers],
            None if self.groups is None else self.groups[numbers],
        )


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The image files of both splits of a data set."""

    train: ImageFiles
    test: ImageFiles
    classes: int
    root: Path  # links that lead out of it are not followed


@dataclass(frozen=True, slots=True)
class ImageFileDataset(ImageDataset, ABC):
    """A data set of image files; only the chosen ones are decoded, once per choice."""

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # of ImageNet
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    damaged: Literal["refuse", "skip"] = param(
        "refuse", "what to do with files that cannot be read: 'refuse' the data set, or 'skip' them"
    )

    def __post_init__(self) -> None:
        ImageDataset.__post_init__(self)  # with slots, super() finds no class
        if self.damaged not in ("refuse", "skip"):
            raise ValueError(
                f"damaged of data set {self.name!r} must be 'refuse' or 'skip', but is "
                f"{self.damaged!r}."
            )

    @abstractmethod
    def list_files(self, seed: int) -> SplitFiles:
        """Return all image files."""

    @abstractmethod
    def make_decoder(self) -> Decoder:
        """Return the decoder of the files."""

    def choose_transform(self, height: int, width: int) -> BatchTransform:
        """Return the batch transform for images of this size."""
        return self.make_transform(self.mean, self.std, min(height, width))

    def load(self, seed: int) -> Dataset:
        """Load the chosen images; decode them unless they are cached."""
        files, skip = self.list_files(seed), self.damaged == "skip"
        train, test = (
            self._choose_files(_check_links(part, files.root, skip=skip), seed, test=tested)
            for part, tested in ((files.train, False), (files.test, True))
        )
        decoder = replace(self.make_decoder(), skip=skip)
        arrays = load_decoded(self.name, train, test, decoder)
        transform = self.choose_transform(*arrays["x"].shape[-2:])
        return make_dataset(self.name, arrays, files.classes, transform)

    def _choose_files(self, files: ImageFiles, seed: int, *, test: bool) -> ImageFiles:
        if not files.paths:
            split = "test" if test else "training"
            raise MissingDataError(f"data set {self.name!r} found no {split} images.")
        # Masks are unknown before they are read: choose them evenly by group.
        kinds = files.groups if isinstance(files.labels, list) else files.labels
        return files.take(self.choose(np.asarray(kinds), seed, test=test))


def find_root(
    data: str, root: str | None, markers: tuple[str, ...], below: tuple[str, ...]
) -> Path:
    """Return the folder that holds every marker: `root`, or a folder named in `below`.

    Args:
        data: the name of the data set.
        root: the folder that the user set, if any.
        markers: files or folders that it must hold.
        below: its possible names within the folders that are searched.
    """
    inner = below if root is None else ("", *below)  # without a root only the name identifies it
    looked = [place / name for place in list_roots(root) for name in inner]
    for folder in looked:
        if all((folder / marker).exists() for marker in markers):
            return folder.resolve()
    needed = " and ".join(markers)
    raise MissingDataError(
        f"data set {data!r} needs a folder with {needed}, but there is none at "
        f"{', '.join(map(str, looked))}; set the data set's root to it, or put it at "
        f"{get_home() / below[0]}."
    )


def list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder`, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def list_images(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name."""
    with os.scandir(folder) as entries:
        names = sorted(
            e.name
            for e in entries
            if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".")
        )
    return [folder / name for name in names]


def _check_links(files: ImageFiles, root: Path, *, skip: bool) -> ImageFiles:
    """Refuse files that are behind links out of the root, or leave them out."""
    masks = files.labels if isinstance(files.labels, list) else []
    folders = {path.parent for path in (*files.paths, *masks)}
    outer = {folder for folder in folders if not folder.resolve().is_relative_to(root)}

    def leads_out(path: Path) -> bool:
        return path.parent in outer or (
            path.is_symlink() and not path.resolve().is_relative_to(root)
        )

    pairs = zip(files.paths, masks or files.paths, strict=True)
    bad = {i for i, pair in enumerate(pairs) if any(map(leads_out, pair))}
    if not bad:
        return files
    if not skip:
        path = files.paths[min(bad)]
        raise DamagedDataError(
            f"{path.parent if path.parent in outer else path} is a link out of {root}, and is not "
            "followed; copy what it leads to, or set damaged = 'skip'."
        )
    return _leave_out(files, bad, f"behind links out of {root}")


def _leave_out(files: ImageFiles, bad: Collection[int], why: str) -> ImageFiles:
    """Return the files without those at the indices `bad`, and tell their names."""
    names = [str(files.paths[i]) for i in sorted(bad)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    log.warning("left out %s: %s%s.", why, ", ".join(names[:_SHOWN]), more)
    return files.take(np.array([i for i in range(len(files.paths)) if i not in bad], np.int64))


def scan_classes(classes: Iterable[tuple[Path, int]]) -> ImageFiles:
    """List the images of (folder, label) pairs with their labels."""
    found = [(path, label) for folder, label in classes for path in list_images(folder)]
    return ImageFiles(
        [path for path, _ in found], np.array([label for _, label in found], np.int64)
    )


def load_decoded(name: str, train: ImageFiles, test: ImageFiles, decoder: Decoder) -> Arrays:
    """Return the arrays of both splits; decode them unless they are cached."""
    key = fingerprint([train, test], decoder.settings + " skip" * decoder.skip)

    def write(folder: Path) -> None:
        for files, end in ((train, ""), (test, "_test")):
            _write_split(folder, files, end, decoder)

    return load_or_create(get_decoded_home() / name / key, write)


def fingerprint(splits: Iterable[ImageFiles], settings: str) -> str:
    """Hash the settings and every file's name, size, modification time, label and group."""
    result = hashlib.sha256(settings.encode())
    for files in splits:
        labels = files.labels
        own = [_describe_file(p) for p in labels] if isinstance(labels, list) else labels.tolist()
        groups = [""] * len(own) if files.groups is None else files.groups.tolist()
        for path, label, group in zip(files.paths, own, groups, strict=True):
            result.update(f"{_describe_file(path)}|{label}|{group}\n".encode())
        result.update(b"\n")
    return result.hexdigest()[:16]


def _describe_file(path: Path) -> str:
    facts = path.stat()
    return f"{path}|{facts.st_size}|{facts.st_mtime_ns}"


def _write_split(folder: Path, files: ImageFiles, end: str, decoder: Decoder) -> None:
    parts = {f"x{end}": (files.paths, decoder.image)}
    if isinstance(files.labels, list):
        if decoder.mask is None:
            raise TypeError("labels that are files need a decoder with a mask.")
        parts[f"y{end}"] = files.labels, decoder.mask
    bad = set[int]()
    for name, (paths, decode) in parts.items():
        bad |= _write_images(folder / f"{name}.npy", paths, decode, skip=decoder.skip)
    if bad:
        files = _leave_out(files, bad, "images that cannot be read")
        for name in parts:
            _drop_rows(folder / f"{name}.npy", bad)
    if not isinstance(files.labels, list):
        save(folder, {f"y{end}": files.labels})
    if files.groups is not None:
        save(folder, {f"groups{end}": files.groups})


def _write_images(target: Path, paths: list[Path], decode: Decode, *, skip: bool) -> set[int]:
    """Decode images into one file, in threads; return the indices of those that were skipped."""
    bad = set[int]()

    def read(number: int) -> ImageArray | None:
        try:
            return _read(paths[number], decode)
        except DamagedDataError:
            if not skip:
                raise
            bad.add(number)
            return None

    first = next((image for image in map(read, range(len(paths))) if image is not None), None)
    if first is None:
        raise DamagedDataError(f"none of {len(paths)} images can be read, such as {paths[0]}.")
    rows = open_memmap(target, "w+", np.uint8, (len(paths), *first.shape))

    def write(number: int) -> None:
        image = read(number)
        if image is not None and image.shape != first.shape:
            raise DamagedDataError(
                f"images must be of one size, but {paths[number]} has shape {image.shape} "
                f"and {paths[0]} has {first.shape}; set the data set's size."
            )
        rows[number] = 0 if image is None else image

    with (
        show_progress(f"decoding {len(paths)} images", len(paths)) as advance,
        ThreadPoolExecutor(count_cores()) as pool,
    ):
        for start in range(0, len(paths), _AT_ONCE):
            for _ in pool.map(write, range(start, min(start + _AT_ONCE, len(paths)))):
                advance(1)
    rows.flush()
    return bad


def _drop_rows(path: Path, bad: Collection[int]) -> None:
    """Write the file of an array again without some of its rows."""
    rows, part = np.load(path, mmap_mode="r"), path.with_suffix(".part")
    kept = open_memmap(part, "w+", rows.dtype, (len(rows) - len(bad), *rows.shape[1:]))
    for new, old in enumerate(i for i in range(len(rows)) if i not in bad):
        kept[new] = rows[old]
    kept.flush()
    part.replace(path)


_FAULTS = (
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,  # where warnings are errors
)


def _read(path: Path, decode: Decode) -> ImageArray:
    try:
        return decode(path)
    except _FAULTS as error:
        fault = str(error).removesuffix("; remove it.")  # of a pipe or a device
        raise DamagedDataError(
            f"the image {path} cannot be read: {fault}; replace it by a whole copy or remove it."
        ) from error
