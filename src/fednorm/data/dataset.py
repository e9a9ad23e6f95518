"""A data set is a value: training and test tensors, and the natural group of every sample."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples and labels to train on, and those to test on.

    Attributes:
        name: the name it is registered under.
        x: training samples, float32, one per row.
        y: their labels, int64, in `range(classes)`.
        x_test: test samples.
        y_test: their labels.
        classes: how many classes there are.
        groups: the natural group (writer, city, hospital) of each training sample, if it has one.
        groups_test: the same for each test sample.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    groups: NDArray[Any] | None = None
    groups_test: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"data set {self.name!r} needs training and test samples of one shape, but has "
                f"{tuple(self.x.shape[1:])} and {tuple(self.x_test.shape[1:])}."
            )
        self._check("training", self.x, self.y, self.groups)
        self._check("test", self.x_test, self.y_test, self.groups_test)

    def _check(self, split: str, x: Tensor, y: Tensor, groups: NDArray[Any] | None) -> None:
        """Check one split: as many labels and groups as samples, and labels that exist."""
        for what, values in (("labels", y), ("groups", groups)):
            if values is not None and len(values) != len(x):
                raise ValueError(
                    f"data set {self.name!r} needs one entry of {what} per {split} sample, but has "
                    f"{len(values)} for {len(x)} samples."
                )
        if y.dtype != torch.int64 or (len(y) and int(y.min()) < 0):
            raise ValueError(
                f"data set {self.name!r} needs int64 labels from 0 on, but its {split} labels are "
                f"{y.dtype} from {y.min().item() if len(y) else 'none'}; renumber them."
            )
        if len(y) and int(y.max()) >= self.classes:
            raise ValueError(
                f"data set {self.name!r} says it has {self.classes} classes, but a {split} label "
                f"is {int(y.max())}; labels go from 0 to classes - 1."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Dataset":
        """Return the same data on a device, the samples in the given floating-point type."""
        return replace(
            self,
            x=self.x.to(device, dtype),
            y=self.y.to(device),
            x_test=self.x_test.to(device, dtype),
            y_test=self.y_test.to(device),
        )


class Source(Protocol):
    """What a registered data set is: a frozen dataclass that makes a `Dataset` from a seed."""

    def load(self, seed: int) -> Dataset:
        """Return the data; the same seed gives the same data everywhere."""
        ...


def random_generator(seed: int, tag: int) -> np.random.Generator:
    """Return the generator of one purpose, so that equal seeds do not mean equal draws."""
    return np.random.default_rng([seed, tag])
