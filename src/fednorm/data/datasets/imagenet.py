"""ImageNet (ILSVRC 2012): 1.28 million photographs in 1000 classes, from a copy on this machine.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (2015), arXiv:1409.0575.
It may not be passed on, so it is not downloaded: `root` holds `train/<class>/*.JPEG` and
`val/<class>/*.JPEG`. Images are resized so that the short side has `size` pixels, and the centre
is cropped; the usual evaluation resizes to 256 and crops 224.
"""

from dataclasses import dataclass
from typing import ClassVar

from fednorm.data.image_files import (
    Decoder,
    ImageFileDataset,
    SplitFiles,
    center_crop,
    find_root,
    list_folders,
    scan_classes,
)
from fednorm.registry import param


@dataclass(frozen=True, slots=True)
class ImageNet(ImageFileDataset):
    """Photographs in 1000 classes, from a copy on this machine."""

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
        return SplitFiles(train, test, len(names))

    def make_decoder(self) -> Decoder:
        """Resize and crop."""
        return center_crop(self.size)
