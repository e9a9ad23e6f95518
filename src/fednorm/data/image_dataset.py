"""The base of image data sets: settings, subsets, and held-out test samples."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.cache import Arrays
from fednorm.data.dataset import Dataset, check_least
from fednorm.data.transforms import BatchTransform
from fednorm.registry import param

Augment = Literal["flip", "crop_flip"]


@dataclass(frozen=True, slots=True)
class ImageDataset:
    """Images held as uint8, normalized and augmented batch by batch."""

    name: ClassVar[str]
    sources: ClassVar[tuple[str, ...]]  # shown in lists

    root: str | None = param(
        None, "folder that holds a copy; none: the usual folders, or a download"
    )
    train: int | None = param(None, "number of training images; none: all")
    test: int | None = param(None, "number of test images; none: all")
    augment: Augment | None = param(
        None, "of training images: none, 'flip' (mirror) or 'crop_flip' (mirror and shift)"
    )
    pad: int | None = param(
        None, "maximum shift of 'crop_flip' in pixels; none: an eighth of the image"
    )

    def __post_init__(self) -> None:
        check_least(self.name, self, "; leave it out to use all.", train=1, test=1)
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

    def make_transform(
        self, mean: tuple[float, ...], std: tuple[float, ...], size: int
    ) -> BatchTransform:
        """Make the batch transform for images whose short side has `size` pixels."""
        if self.augment is None:
            return BatchTransform(mean, std)
        shift = max(1, size // 8) if self.pad is None else self.pad
        return BatchTransform(mean, std, pad=shift if self.augment == "crop_flip" else 0, flip=True)

    def choose(self, labels: NDArray[Any], seed: int, *, test: bool) -> NDArray[np.int64]:
        """Return the indices of the samples to use, in ascending order."""
        count = self.test if test else self.train
        if count is None:
            return np.arange(len(labels))
        split = "test" if test else "training"
        rng = make_rng(seed, Stream.TEST_SUBSET if test else Stream.TRAIN_SUBSET)
        return draw_balanced(f"{split} part of data set {self.name!r}", labels, count, rng)

    def subsample(self, arrays: Arrays, seed: int) -> Arrays:
        """Draw `train` and `test` samples from the two splits."""
        result = dict(arrays)
        if self.train is not None:
            result |= _take(result, self.choose(result["y"], seed, test=False), "")
            if "groups_test" in result:  # do not test groups that no longer train
                seen = np.isin(result["groups_test"], result["groups"])
                result |= _take(result, np.flatnonzero(seen), "_test")
        if self.test is not None:
            result |= _take(result, self.choose(result["y_test"], seed, test=True), "_test")
        return result


def make_dataset(name: str, arrays: Arrays, classes: int, transform: BatchTransform) -> Dataset:
    """Make a data set from arrays; mapped ones stay on disk."""
    tested = arrays.get("groups_test")
    if tested is not None and not np.isin(tested, arrays["groups"]).any():
        tested = None  # training has none of these groups
    return Dataset(
        name,
        x=torch.from_numpy(arrays["x"]),
        y=_to_labels(arrays["y"]),
        x_test=torch.from_numpy(arrays["x_test"]),
        y_test=_to_labels(arrays["y_test"]),
        classes=classes,
        groups=arrays.get("groups"),
        groups_test=tested,
        transform=transform,
        on_disk=any(isinstance(array, np.memmap) for array in arrays.values()),
    )


def _take(arrays: Arrays, numbers: NDArray[np.int64], end: str) -> Arrays:
    keys = (f"{key}{end}" for key in ("x", "y", "groups"))
    return {key: arrays[key][numbers] for key in keys if key in arrays}


def _to_labels(y: NDArray[Any]) -> Tensor:
    labels = torch.from_numpy(y)
    return labels.long() if labels.dim() == 1 else labels  # masks stay uint8


def draw_balanced(
    owner: str, labels: NDArray[Any], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw `count` indices evenly from the classes; return them in ascending order.

    Classes take turns, each giving its samples in random order, until there are `count`; a class
    without further samples is skipped.

    >>> draw_balanced("mine", np.array([0, 0, 0, 0, 1]), 3, np.random.default_rng(0))[-1]
    np.int64(4)
    """
    if count > len(labels):
        raise ValueError(f"{owner} has {len(labels)} samples, but {count} are requested.")
    order = rng.permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        own = order[labels[order] == label]
        turn[own] = np.arange(len(own))
    # Within a turn the random order decides which classes come first.
    return np.sort(order[np.argsort(turn[order], kind="stable")][:count])


def hold_out(kinds: NDArray[Any], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Choose test samples: the same share of every kind, rounded.

    >>> hold_out(np.array([0, 0, 0, 0, 1, 1]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        chosen[rng.permutation(own)[: round(share * len(own))]] = True
    return chosen


def check_share(name: str, share: float) -> None:
    """Raise ValueError if the share leaves a split empty."""
    if not 0 < share < 1:
        raise ValueError(f"data set {name!r} needs test_share between 0 and 1, but got {share}.")


def split(arrays: Arrays, kinds: NDArray[Any], share: float, rng: np.random.Generator) -> Arrays:
    """Split arrays into training arrays and test arrays, named with `_test`."""
    held = hold_out(kinds, share, rng)
    train = {name: array[~held] for name, array in arrays.items()}
    return train | {f"{name}_test": array[held] for name, array in arrays.items()}
