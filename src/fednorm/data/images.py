"""What image data sets have in common: where they are, how many samples, how they are varied."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednorm.core.registry import param
from fednorm.data.dataset import Dataset, random_generator
from fednorm.data.look import Look
from fednorm.data.store import Arrays
from fednorm.data.subset import balanced

TAG = 103

Augment = Literal["flip", "crop_flip"]


@dataclass(frozen=True, slots=True)
class Images:
    """Images held as bytes, normalised and varied batch by batch."""

    name: ClassVar[str]
    sources: ClassVar[tuple[str, ...]]  # where it comes from

    root: str | None = param(
        None, "folder that holds a copy; none: the usual places, or a download"
    )
    train: int | None = param(None, "how many training images are used; none: all")
    test: int | None = param(None, "how many test images are used; none: all")
    augment: Augment | None = param(
        None, "training images: none as they are, 'flip' mirrored, 'crop_flip' shifted as well"
    )
    pad: int | None = param(
        None, "pixels by which 'crop_flip' shifts at most; none: an eighth of the image"
    )

    def __post_init__(self) -> None:
        """Check the counts and the choice."""
        for field in ("train", "test"):
            count = getattr(self, field)
            if count is not None and count < 1:
                raise ValueError(
                    f"data set {self.name!r} needs {field} of at least 1, but got {count}; "
                    "leave it out to use all."
                )
        if self.augment not in (None, *get_args(Augment)):
            raise ValueError(
                f"augment of data set {self.name!r} must be none, 'flip' or 'crop_flip', "
                f"but is {self.augment!r}."
            )
        if self.pad is not None and (self.pad < 0 or self.augment != "crop_flip"):
            raise ValueError(
                f"pad of data set {self.name!r} is for augment = 'crop_flip', and not negative, "
                f"but is {self.pad} with augment = {self.augment!r}."
            )

    def look(self, mean: tuple[float, ...], std: tuple[float, ...], size: int) -> Look:
        """Return how batches of images with so many pixels on their short side are made."""
        if self.augment is None:
            return Look(mean, std)
        shift = max(1, size // 8) if self.pad is None else self.pad
        return Look(mean, std, pad=shift if self.augment == "crop_flip" else 0, flip=True)

    def chosen(self, labels: NDArray[Any], seed: int, *, test: bool) -> NDArray[np.int64]:
        """Return which samples are used, in ascending order."""
        count = self.test if test else self.train
        if count is None:
            return np.arange(len(labels))
        split = "test" if test else "training"
        rng = random_generator(seed, TAG + test)
        return balanced(f"{split} part of data set {self.name!r}", labels, count, rng)

    def some(self, arrays: Arrays, seed: int) -> Arrays:
        """Return as many samples of each split as are asked for."""
        result = dict(arrays)
        if self.train is not None:
            result |= _taken(result, self.chosen(result["y"], seed, test=False), "")
            if "groups_test" in result:  # a group that no longer trains is not tested either
                seen = np.isin(result["groups_test"], result["groups"])
                result |= _taken(result, np.flatnonzero(seen), "_test")
        if self.test is not None:
            result |= _taken(result, self.chosen(result["y_test"], seed, test=True), "_test")
        return result


def dataset(name: str, arrays: Arrays, *, classes: int, look: Look) -> Dataset:
    """Return the data set of these arrays; those mapped from a file stay there."""
    return Dataset(
        name,
        x=torch.from_numpy(arrays["x"]),
        y=_labels(arrays["y"]),
        x_test=torch.from_numpy(arrays["x_test"]),
        y_test=_labels(arrays["y_test"]),
        classes=classes,
        groups=arrays.get("groups"),
        groups_test=_own_groups(arrays),
        look=look,
        on_disk=any(isinstance(array, np.memmap) for array in arrays.values()),
    )


def _taken(arrays: Arrays, numbers: NDArray[np.int64], end: str) -> Arrays:
    keys = (f"{key}{end}" for key in ("x", "y", "groups"))
    return {key: arrays[key][numbers] for key in keys if key in arrays}


def _own_groups(arrays: Arrays) -> NDArray[Any] | None:
    """Return the groups of test samples, unless all are groups that nobody trains on."""
    tested = arrays.get("groups_test")
    if tested is None or not np.isin(tested, arrays["groups"]).any():
        return None
    return tested


def _labels(y: NDArray[Any]) -> Tensor:
    labels = torch.from_numpy(y)
    return labels.long() if labels.dim() == 1 else labels  # masks stay bytes
