"""Cityscapes: street scenes of European cities with pixel labels; one client per city.

Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding" (2016),
arXiv:1604.01685. It needs a registration, so it is not downloaded: `root` holds `leftImg8bit` and
`gtFine`. The 19 classes of the benchmark are used; other pixels have no label.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from fednorm.data.decoder import Decode, Decoder, ImageArray, open_image, resize
from fednorm.data.image_files import (
    ImageFileDataset,
    ImageFiles,
    SplitFiles,
    find_root,
    list_folders,
    list_images,
)
from fednorm.data.transforms import IGNORED, BatchTransform
from fednorm.errors import MissingDataError
from fednorm.registry import param

# The id of each benchmark class, road to bicycle, in the label files.
LABELS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
IMAGE, MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"


@dataclass(frozen=True, slots=True)
class Cityscapes(ImageFileDataset):
    """Street scenes with a class for every pixel, from your copy; groups are cities."""

    name: ClassVar[str] = "cityscapes"
    sources: ClassVar[tuple[str, ...]] = ("your copy: root",)

    size: tuple[int, int] = param((256, 512), "height and width to which images are resized")
    crop: tuple[int, int] | None = param(None, "height and width of random crops for training")

    def __post_init__(self) -> None:
        """Check that the crop fits."""
        ImageFileDataset.__post_init__(self)  # with slots, super() finds no class
        if min(self.size) < 1 or (self.crop and any(np.greater(self.crop, self.size))):
            raise ValueError(
                f"data set {self.name!r} needs a size of at least 1x1 and a crop within it, but "
                f"got size={tuple(self.size)} and crop={self.crop}."
            )

    def list_files(self, seed: int) -> SplitFiles:
        """Return images and masks of the folders `train` and `val`, city by city."""
        del seed
        root = find_root(self.name, self.root, ("leftImg8bit/train", "gtFine/train"), (self.name,))
        train, test = scan_split(root, "train"), scan_split(root, "val")
        return SplitFiles(train, test, len(LABELS), root)

    def make_decoder(self) -> Decoder:
        """Resize images and masks."""
        height, width = self.size
        return Decoder(
            resize((height, width)), f"{height}x{width}", make_mask_decoder((height, width))
        )

    def choose_transform(self, height: int, width: int) -> BatchTransform:
        """Crop training images at random."""
        transform = self.make_transform(self.mean, self.std, min(height, width))
        if self.crop is None:
            return transform
        tall, wide = self.crop
        return replace(transform, window=(tall, wide))


def scan_split(root: Path, split: str) -> ImageFiles:
    """List the images of a split with their masks and cities."""
    images, masks, cities = [], [], []
    for city in list_folders(root / "leftImg8bit" / split):
        for path in list_images(root / "leftImg8bit" / split / city):
            pair = root / "gtFine" / split / city / path.name.replace(IMAGE, MASK)
            if not pair.exists():
                raise MissingDataError(f"the image {path} needs its labels at {pair}.")
            images.append(path)
            masks.append(pair)
            cities.append(city)
    return ImageFiles(images, masks, np.array(cities))


def make_mask_decoder(size: tuple[int, int]) -> Decode:
    """Return a function that reads a label file as benchmark classes."""
    height, width = size
    classes = np.full(256, IGNORED, np.uint8)
    classes[list(LABELS)] = np.arange(len(LABELS))

    def decode(path: Path) -> ImageArray:
        with open_image(path) as image:
            ids = np.asarray(image.resize((width, height), Image.Resampling.NEAREST))
        return np.asarray(classes[ids])

    return decode
