"""Data sets of image files: find the files, decode the ones in use, and cache the arrays.

Files are chosen by their names before any is read. Threads decode them, and the arrays are cached
under a fingerprint of the files and the settings of the decoder.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fednorm.data.cache import Arrays, get_decoded_home, get_home, list_roots, load_or_create, save
from fednorm.data.dataset import Dataset
from fednorm.data.image_dataset import ImageDataset, make_dataset
from fednorm.data.progress_bar import Advance, show_progress
from fednorm.data.transforms import Look
from fednorm.errors import DamagedDataError, MissingDataError

Picture: TypeAlias = NDArray[np.uint8]
Decode: TypeAlias = Callable[[Path], Picture]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
_AT_ONCE = 4096  # files handed to the threads; their results go straight to disk


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The picture files of one split, with their labels and groups.

    Attributes:
        paths: the picture files.
        labels: the class of each; if every pixel has one, the files of the masks.
        groups: the natural group of each, if they have one.
    """

    paths: list[Path]
    labels: NDArray[np.int64] | list[Path]
    groups: NDArray[Any] | None = None

    def take(self, numbers: NDArray[np.int64]) -> "ImageFiles":
        """Return the pictures with these numbers."""
        labels = self.labels
        return ImageFiles(
            [self.paths[i] for i in numbers],
            [labels[i] for i in numbers] if isinstance(labels, list) else labels[numbers],
            None if self.groups is None else self.groups[numbers],
        )


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The picture files of both splits of a data set."""

    train: ImageFiles
    test: ImageFiles
    classes: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """How pictures and masks are read; `settings` must differ wherever the result does."""

    picture: Decode
    settings: str
    mask: Decode | None = None


@dataclass(frozen=True, slots=True)
class ImageFileDataset(ImageDataset, ABC):
    """A folder of picture files; only the chosen ones are decoded, once for each choice."""

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # of ImageNet
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    @abstractmethod
    def list_files(self, seed: int) -> SplitFiles:
        """Return all picture files."""

    @abstractmethod
    def make_decoder(self) -> Decoder:
        """Return the decoder of the files."""

    def choose_look(self, height: int, width: int) -> Look:
        """Return the batch transform for pictures of this size."""
        return self.make_look(self.mean, self.std, min(height, width))

    def load(self, seed: int) -> Dataset:
        """Return the chosen pictures, decoded."""
        files = self.list_files(seed)
        train = self._choose_files(files.train, seed, test=False)
        test = self._choose_files(files.test, seed, test=True)
        arrays = load_decoded(self.name, train, test, self.make_decoder())
        look = self.choose_look(*arrays["x"].shape[-2:])
        return make_dataset(self.name, arrays, classes=files.classes, look=look)

    def _choose_files(self, files: ImageFiles, seed: int, *, test: bool) -> ImageFiles:
        if not files.paths:
            split = "test" if test else "training"
            raise MissingDataError(f"data set {self.name!r} found no {split} pictures.")
        # Masks are not known before they are read: those are chosen evenly by their group.
        kinds = files.groups if isinstance(files.labels, list) else files.labels
        return files.take(self.choose(np.asarray(kinds), seed, test=test))


def find_root(
    data: str, root: str | None, markers: tuple[str, ...], below: tuple[str, ...]
) -> Path:
    """Return the folder that holds every marker: `root`, or a folder named in `below`.

    Args:
        data: the name of the data set.
        root: the folder that the user gave, if any.
        markers: what the folder must hold.
        below: the names that it may have in a folder that is searched.
    """
    inner = below if root is None else ("", *below)  # elsewhere only the name identifies it
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
    """Return the names of the folders in a folder, sorted; hidden ones do not count."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def list_images(folder: Path) -> list[Path]:
    """Return the picture files of a folder, sorted by name."""
    with os.scandir(folder) as entries:
        names = sorted(
            e.name
            for e in entries
            if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".")
        )
    return [folder / name for name in names]


def scan_classes(classes: Iterable[tuple[Path, int]]) -> ImageFiles:
    """Return the pictures of folders, each with the class of its folder."""
    found = [(path, label) for folder, label in classes for path in list_images(folder)]
    return ImageFiles(
        [path for path, _ in found], np.array([label for _, label in found], np.int64)
    )


def center_crop(size: int | None, channels: int = 3) -> Decoder:
    """Return a decoder that resizes the short side to `size` and crops the centre.

    Without a size, pictures are left as large as they are.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 pixel, but is {size}.")
    return Decoder(lambda path: _read_square(path, size, channels), f"square {size} {channels}")


def _read_square(path: Path, size: int | None, channels: int) -> Picture:
    with Image.open(path) as picture:
        if size is not None:  # a large JPEG is read at a fraction of its size, at least twice ours
            picture.draft(None, (2 * size, 2 * size))
        return to_array(picture, size, channels)


def to_array(picture: Image.Image, size: int | None, channels: int) -> Picture:
    """Return a picture as channels x height x width; with a size, its centre."""
    converted = picture.convert("RGB" if channels == 3 else "L")  # noqa: PLR2004 (red, green, blue)
    if size is not None and converted.size != (size, size):
        converted = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if array.ndim > 2 else array[None]  # noqa: PLR2004


def resize(size: tuple[int, int]) -> Decode:
    """Return a function that reads a picture and resizes it bilinearly to height and width."""
    height, width = size

    def decode(path: Path) -> Picture:
        with Image.open(path) as picture:
            resized = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))

    return decode


def load_decoded(name: str, train: ImageFiles, test: ImageFiles, decoder: Decoder) -> Arrays:
    """Return the arrays of both splits; decode them unless they are in the cache."""
    key = fingerprint([train, test], decoder.settings)

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

    with show_progress(f"decoding {len(paths)} pictures", len(paths)) as advance:
        _run_in_threads(one, len(paths), advance)
    rows.flush()


def _run_in_threads(work: Callable[[int], None], count: int, advance: Advance) -> None:
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
