"""What image data sets have in common: where they are, how many samples, how they are varied."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fednorm.core.registry import param
from fednorm.data.dataset import Dataset, random_generator
from fednorm.data.look import Look
from fednorm.data.store import Arrays
from fednorm.data.subset import balanced

TAG = 103

Augment = Literal["none", "flip", "crop_flip"]


@dataclass(frozen=True, slots=True)
class Images:
    """Images held as bytes, normalised and varied batch by batch."""

    name: ClassVar[str]

    root: str | None = param(None, "folder that holds a copy; else the usual places, then download")
    train: int | None = param(None, "how many training images are used; none: all")
    test: int | None = param(None, "how many test images are used; none: all")
    augment: Augment = param(
        "none", "training images: 'none' as they are, 'flip' mirrored, 'crop_flip' shifted as well"
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
        if self.augment not in get_args(Augment):
            raise ValueError(
                f"augment of data set {self.name!r} must be 'none', 'flip' or 'crop_flip', "
                f"but is {self.augment!r}."
            )

    def look(self, mean: tuple[float, ...], std: tuple[float, ...], size: int) -> Look:
        """Return how batches of images with so many pixels on their short side are made."""
        pad = max(1, size // 8) if self.augment == "crop_flip" else 0
        return Look(mean, std, pad=pad, flip=self.augment != "none")

    def chosen(self, labels: NDArray[Any], seed: int, *, test: bool) -> NDArray[np.int64] | None:
        """Return which samples are used, in ascending order; None if all are."""
        count = self.test if test else self.train
        if count is None:
            return None
        return balanced(
            f"data set {self.name!r}", labels, count, random_generator(seed, TAG + test)
        )

    def dataset(self, arrays: Arrays, seed: int, *, classes: int, look: Look) -> Dataset:
        """Return the data set of these arrays, or of so many of them as are asked for."""
        train = self.chosen(arrays["y"], seed, test=False)
        test = self.chosen(arrays["y_test"], seed, test=True)
        return Dataset(
            self.name,
            x=torch.from_numpy(_taken(arrays["x"], train)),
            y=torch.from_numpy(_taken(arrays["y"], train)).long(),
            x_test=torch.from_numpy(_taken(arrays["x_test"], test)),
            y_test=torch.from_numpy(_taken(arrays["y_test"], test)).long(),
            classes=classes,
            groups=_taken(arrays["groups"], train) if "groups" in arrays else None,
            groups_test=_taken(arrays["groups_test"], test) if "groups_test" in arrays else None,
            look=look,
            on_disk=train is None and isinstance(arrays["x"], np.memmap),
        )


def _taken(array: NDArray[Any], chosen: NDArray[np.int64] | None) -> NDArray[Any]:
    return array if chosen is None else array[chosen]
