"""ImageNet, from a copy on this machine, and Tiny ImageNet, which can be downloaded."""

import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from filelock import FileLock

from fednorm.data.cache import get_home, list_roots
from fednorm.data.decoder import Decoder, center_crop
from fednorm.data.image_files import (
    ImageFileDataset,
    ImageFiles,
    SplitFiles,
    find_root,
    list_folders,
    scan_classes,
)
from fednorm.data.sources import check_unpacked, download
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.registry import param

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FOLDER = "tiny-imagenet-200"
_MOST_UNPACKED = 2_000_000_000  # bytes, of all images together
MARKERS = ("train", "val/val_annotations.txt")


@dataclass(frozen=True, slots=True)
class ImageNet(ImageFileDataset):
    """Photographs in 1000 classes, from a copy on this machine.

    ILSVRC 2012, 1.28 million photographs: Russakovsky et al., "ImageNet Large Scale Visual
    Recognition Challenge" (2015), arXiv:1409.0575. It may not be passed on, so it is not
    downloaded: `root` holds `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Images are resized so
    that the short side has `size` pixels, and the centre is cropped; the usual evaluation resizes
    to 256 and crops 224.
    """

    name: ClassVar[str] = "imagenet"
    sources: ClassVar[tuple[str, ...]] = ("your copy: root",)

    size: int = param(64, "height and width: the short side is resized, the centre cropped")

    def list_files(self, seed: int) -> SplitFiles:
        """Return the images of the folders `train` and `val`."""
        del seed
        below = ("imagenet", "ILSVRC/Data/CLS-LOC")
        root = find_root(self.name, self.root, ("train", "val"), below)
        names = list_folders(root / "train")
        if list_folders(root / "val") != names:
            raise ValueError(
                f"data set {self.name!r} needs one folder per class in {root / 'val'}, named as "
                f"the {len(names)} in {root / 'train'}; sort the images into them."
            )
        train, test = (
            scan_classes((root / split / name, label) for label, name in enumerate(names))
            for split in ("train", "val")
        )
        return SplitFiles(train, test, len(names), root)

    def make_decoder(self) -> Decoder:
        """Resize and crop."""
        return center_crop(self.size)


@dataclass(frozen=True, slots=True)
class TinyImageNet(ImageFileDataset):
    """Photographs of 64x64 pixels in 200 classes, 100 000 to train on and 10 000 to test on.

    Le and Yang, "Tiny ImageNet Visual Recognition Challenge" (Stanford CS 231N, 2015). The official
    test labels are not public: testing uses the validation part, as is usual. A copy on this
    machine (the folder or the zip) is used if there is one, else the zip is downloaded and
    unpacked.
    """

    name: ClassVar[str] = "tiny_imagenet"
    sources: ClassVar[tuple[str, ...]] = ("cs231n.stanford.edu",)

    def list_files(self, seed: int) -> SplitFiles:
        """Return the images of the folders `train` and `val`."""
        del seed
        root = self._find_folder()
        names = list_folders(root / "train")
        train = scan_classes((root / "train" / name / "images", i) for i, name in enumerate(names))
        return SplitFiles(train, scan_annotations(root / "val", names), len(names), root)

    def make_decoder(self) -> Decoder:
        """Keep the size of the images."""
        return center_crop(None)

    def _find_folder(self) -> Path:
        try:
            return find_root(self.name, self.root, MARKERS, (FOLDER,))
        except MissingDataError as missing:
            self._unpack(missing)
        return find_root(self.name, None, MARKERS, (FOLDER,))

    def _unpack(self, missing: MissingDataError) -> None:
        """Unpack the zip into the folder of all data sets, completely or not at all."""
        get_home().mkdir(parents=True, exist_ok=True)
        lock = FileLock(get_home() / f".{self.name}.lock")  # concurrent runs need the same data
        with lock, tempfile.TemporaryDirectory(dir=get_home()) as scratch:
            if (get_home() / FOLDER).exists():
                return
            archive = self._find_zip(Path(scratch), missing)
            try:
                with zipfile.ZipFile(archive) as file:
                    total = sum(info.file_size for info in file.infolist())
                    check_unpacked(archive.name, total, _MOST_UNPACKED)
                    file.extractall(scratch)
            except (zipfile.BadZipFile, zlib.error, DamagedDataError) as error:
                raise DamagedDataError(f"{archive} is damaged: {error}; remove it.") from error
            (Path(scratch) / FOLDER).rename(get_home() / FOLDER)

    def _find_zip(self, scratch: Path, missing: MissingDataError) -> Path:
        """Return the zip: a copy on this machine, or else a download."""
        for folder in list_roots(self.root):
            if (folder / f"{FOLDER}.zip").exists():
                return folder / f"{FOLDER}.zip"
        if self.root is not None:
            raise missing
        try:
            return download(URL, scratch, MD5)
        except (OSError, ValueError) as error:
            raise MissingDataError(f"{missing}\nTried {URL}: {error}") from error


def scan_annotations(folder: Path, names: list[str]) -> ImageFiles:
    """List the validation images with the classes of a text file."""
    lines = (folder / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t")[:2] for line in lines if line.strip()]
    label = {name: number for number, name in enumerate(names)}
    return ImageFiles(
        [folder / "images" / file for file, _ in pairs],
        np.array([label[name] for _, name in pairs], np.int64),
    )
