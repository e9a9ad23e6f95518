"""Data sets of image files: find the files, decode the chosen ones, and cache the arrays.

Files are chosen by name before any is read. Threads decode them, and the arrays are cached under a
fingerprint of the files and the decoder's settings.
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
from fednorm.data.download import show_progress
from fednorm.data.image_dataset import ImageDataset, make_dataset
from fednorm.data.transforms import BatchTransform
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.system import count_cores

ImageArray: TypeAlias = NDArray[np.uint8]
Decode: TypeAlias = Callable[[Path], ImageArray]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
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


@dataclass(frozen=True, slots=True)
class Decoder:
    """Functions that read images and masks; `settings` identify their results."""

    image: Decode
    settings: str
    mask: Decode | None = None


@dataclass(frozen=True, slots=True)
class ImageFileDataset(ImageDataset, ABC):
    """A data set of image files; only the chosen ones are decoded, once per choice."""

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # of ImageNet
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

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
        files = self.list_files(seed)
        train = self._choose_files(files.train, seed, test=False)
        test = self._choose_files(files.test, seed, test=True)
        arrays = load_decoded(self.name, train, test, self.make_decoder())
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


def scan_classes(classes: Iterable[tuple[Path, int]]) -> ImageFiles:
    """List the images of (folder, label) pairs with their labels."""
    found = [(path, label) for folder, label in classes for path in list_images(folder)]
    return ImageFiles(
        [path for path, _ in found], np.array([label for _, label in found], np.int64)
    )


def center_crop(size: int | None, channels: int = 3) -> Decoder:
    """Return a decoder that resizes the short side to `size` and crops the centre.

    Without a size, images keep theirs.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 pixel, but is {size}.")

    def decode(path: Path) -> ImageArray:
        with Image.open(path) as image:
            if size is not None:  # read a large JPEG at a fraction of its size, at least twice it
                image.draft(None, (2 * size, 2 * size))
            return to_array(image, size, channels)

    return Decoder(decode, f"square {size} {channels}")


def to_array(image: Image.Image, size: int | None, channels: int) -> ImageArray:
    """Convert an image to channels x height x width; with a size, crop its centre."""
    converted = image.convert("RGB" if channels == 3 else "L")  # noqa: PLR2004 (red, green, blue)
    if size is not None and converted.size != (size, size):
        converted = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if array.ndim > 2 else array[None]  # noqa: PLR2004


def resize(size: tuple[int, int]) -> Decode:
    """Return a function that reads an image and resizes it to (height, width)."""
    height, width = size

    def decode(path: Path) -> ImageArray:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return to_array(resized, None, 3)

    return decode


def load_decoded(name: str, train: ImageFiles, test: ImageFiles, decoder: Decoder) -> Arrays:
    """Return the arrays of both splits; decode them unless they are cached."""
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
    _write_images(folder / f"x{end}.npy", files.paths, decoder.image)
    if isinstance(files.labels, list):
        if decoder.mask is None:
            raise TypeError("labels that are files need a decoder with a mask.")
        _write_images(folder / f"y{end}.npy", files.labels, decoder.mask)
    else:
        save(folder, {f"y{end}": files.labels})
    if files.groups is not None:
        save(folder, {f"groups{end}": files.groups})


def _write_images(target: Path, paths: list[Path], decode: Decode) -> None:
    """Decode images into one file; every thread writes other rows."""
    shape = (len(paths), *_read(paths[0], decode).shape)
    rows = open_memmap(target, "w+", np.uint8, shape)

    def one(number: int) -> None:
        image = _read(paths[number], decode)
        if image.shape != shape[1:]:
            raise DamagedDataError(
                f"images must be of one size, but {paths[number]} has shape {image.shape} "
                f"and {paths[0]} has {shape[1:]}; set the data set's size."
            )
        rows[number] = image

    with (
        show_progress(f"decoding {len(paths)} images", len(paths)) as advance,
        ThreadPoolExecutor(count_cores()) as pool,
    ):
        for start in range(0, len(paths), _AT_ONCE):
            for _ in pool.map(one, range(start, min(start + _AT_ONCE, len(paths)))):
                advance(1)
    rows.flush()


def _read(path: Path, decode: Decode) -> ImageArray:
    try:
        return decode(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedDataError(
            f"the image {path} cannot be read: {error}; replace it by a whole copy or remove it."
        ) from error
