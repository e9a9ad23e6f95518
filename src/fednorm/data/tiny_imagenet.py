"""Tiny ImageNet: 110 000 photographs of 64x64 pixels in 200 classes.

Le and Yang, "Tiny ImageNet Visual Recognition Challenge" (Stanford CS 231N, 2015). The official
test labels are not public: testing uses the validation part, as everybody does. A copy on this
machine (the folder or the zip) is used if there is one, else the zip is downloaded and unpacked.
"""

import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from filelock import FileLock

from fednorm.data.cache import home, roots
from fednorm.data.fetch import download
from fednorm.data.pictured import Listing, Pictured, of_classes
from fednorm.data.pictures import Decoder, Files
from fednorm.data.places import located, subfolders
from fednorm.data.resize import square
from fednorm.data.store import DamagedDataError
from fednorm.data.ways import MissingDataError

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FOLDER = "tiny-imagenet-200"
MARKERS = ("train", "val/val_annotations.txt")


@dataclass(frozen=True, slots=True)
class TinyImageNet(Pictured):
    """Photographs of 64x64 pixels in 200 classes, 100 000 to train on and 10 000 to test on."""

    name: ClassVar[str] = "tiny_imagenet"
    sources: ClassVar[tuple[str, ...]] = ("cs231n.stanford.edu",)

    def listing(self, seed: int) -> Listing:
        """Return the pictures of the folders `train` and `val`."""
        del seed
        root = self._folder()
        names = subfolders(root / "train")
        train = of_classes((root / "train" / name / "images", i) for i, name in enumerate(names))
        return Listing(train, annotated(root / "val", names), len(names))

    def decoder(self) -> Decoder:
        """Take pictures as large as they are."""
        return square(None)

    def _folder(self) -> Path:
        try:
            return located(self.name, self.root, MARKERS, (FOLDER,))
        except MissingDataError as missing:
            self._unpack(missing)
        return located(self.name, None, MARKERS, (FOLDER,))

    def _unpack(self, missing: MissingDataError) -> None:
        """Unpack the zip beside other data sets; what was interrupted is not used."""
        home().mkdir(parents=True, exist_ok=True)
        lock = FileLock(home() / f".{self.name}.lock")  # runs side by side need the same data
        with lock, tempfile.TemporaryDirectory(dir=home()) as scratch:
            if (home() / FOLDER).exists():
                return
            archive = self._zip(Path(scratch), missing)
            try:
                with zipfile.ZipFile(archive) as file:
                    file.extractall(scratch)
            except (zipfile.BadZipFile, zlib.error) as error:
                raise DamagedDataError(f"{archive} is damaged: {error}; remove it.") from error
            (Path(scratch) / FOLDER).rename(home() / FOLDER)

    def _zip(self, scratch: Path, missing: MissingDataError) -> Path:
        """Return the zip: a copy on this machine, or else a download."""
        for folder in roots(self.root):
            if (folder / f"{FOLDER}.zip").exists():
                return folder / f"{FOLDER}.zip"
        if self.root is not None:
            raise missing
        try:
            return download(URL, scratch, MD5)
        except (OSError, ValueError) as error:
            raise MissingDataError(f"{missing}\nTried {URL}: {error}") from error


def annotated(folder: Path, names: list[str]) -> Files:
    """Return the validation pictures, whose classes a text file tells."""
    lines = (folder / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t")[:2] for line in lines if line.strip()]
    label = {name: number for number, name in enumerate(names)}
    return Files(
        [folder / "images" / file for file, _ in pairs],
        np.array([label[name] for _, name in pairs], np.int64),
    )
