"""Cityscapes: street scenes of European cities, every pixel labelled; one client a city.

Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding" (2016),
arXiv:1604.01685. It needs a registration, so it is not downloaded: `root` holds `leftImg8bit` and
`gtFine`. The 19 classes of the benchmark are used; other pixels have no label.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from fednorm.data.image_files import (
    Decode,
    Decoder,
    ImageFileDataset,
    ImageFiles,
    Picture,
    SplitFiles,
    find_root,
    list_folders,
    list_images,
    resize,
)
from fednorm.data.transforms import IGNORED, Look
from fednorm.errors import MissingDataError
from fednorm.registry import param

# The id of each benchmark class, road to bicycle, in the files of labels.
LABELS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
PICTURE, MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"


@dataclass(frozen=True, slots=True)
class Cityscapes(ImageFileDataset):
    """Street scenes with a class for every pixel, from your copy; groups are cities."""

    name: ClassVar[str] = "cityscapes"
    sources: ClassVar[tuple[str, ...]] = ("your copy: root",)

    size: tuple[int, int] = param((256, 512), "height and width to which pictures are resized")
    crop: tuple[int, int] | None = param(None, "height and width cut out at random for training")

    def __post_init__(self) -> None:
        """Check that the crop fits."""
        ImageFileDataset.__post_init__(self)  # with slots, super() finds no class
        if min(self.size) < 1 or (self.crop and any(np.greater(self.crop, self.size))):
            raise ValueError(
                f"data set {self.name!r} needs a size of at least 1x1 and a crop within it, but "
                f"got size={tuple(self.size)} and crop={self.crop}."
            )

    def list_files(self, seed: int) -> SplitFiles:
        """Return pictures and masks of the folders `train` and `val`, city by city."""
        del seed
        root = find_root(self.name, self.root, ("leftImg8bit/train", "gtFine/train"), (self.name,))
        return SplitFiles(scan_split(root, "train"), scan_split(root, "val"), len(LABELS))

    def make_decoder(self) -> Decoder:
        """Resize pictures and masks."""
        height, width = self.size
        return Decoder(
            resize((height, width)), f"{height}x{width}", make_mask_decoder((height, width))
        )

    def choose_look(self, height: int, width: int) -> Look:
        """Cut the crop out of training pictures."""
        look = self.make_look(self.mean, self.std, min(height, width))
        if self.crop is None:
            return look
        tall, wide = self.crop
        return replace(look, window=(tall, wide))


def scan_split(root: Path, split: str) -> ImageFiles:
    """Return the pictures of a split, each with its mask and its city."""
    pictures, masks, cities = [], [], []
    for city in list_folders(root / "leftImg8bit" / split):
        for path in list_images(root / "leftImg8bit" / split / city):
            pair = root / "gtFine" / split / city / path.name.replace(PICTURE, MASK)
            if not pair.exists():
                raise MissingDataError(f"the picture {path} needs its labels at {pair}.")
            pictures.append(path)
            masks.append(pair)
            cities.append(city)
    return ImageFiles(pictures, masks, np.array(cities))


def make_mask_decoder(size: tuple[int, int]) -> Decode:
    """Return a function that reads a file of labels as benchmark classes."""
    height, width = size
    classes = np.full(256, IGNORED, np.uint8)
    classes[list(LABELS)] = np.arange(len(LABELS))

    def decode(path: Path) -> Picture:
        with Image.open(path) as picture:
            ids = np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))
        return np.asarray(classes[ids])

    return decode
