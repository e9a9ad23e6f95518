"""A data set as a value: training and test tensors, and the natural group of every sample."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednorm.data.transforms import IDENTITY, IGNORED, Batch, BatchTransform

_EVERY = 8  # every eighth pixel of a mask is counted
_MOST_SAMPLES, _MOST_VALUES = 1000, 4_000_000  # of a test batch


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples and labels to train on, and those to test on.

    Attributes:
        name: the name it is registered under.
        x: training samples, one per row: float32, or images as uint8.
        y: their labels, int64, in `range(classes)`; for segmentation, uint8 masks in which 255
            marks a pixel without a label.
        x_test: test samples.
        y_test: their labels.
        classes: the number of classes.
        groups: the natural group (writer, city, hospital) of each training sample, if known.
        groups_test: the same for each test sample.
        transform: applied to a batch before a model sees it.
        on_disk: whether the samples are mapped from a file, being too large for memory.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    groups: NDArray[Any] | None = None
    groups_test: NDArray[Any] | None = None
    transform: BatchTransform = IDENTITY
    on_disk: bool = False

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
        """Check one split: one label and group per sample, and labels within range."""
        for what, values in (("labels", y), ("groups", groups)):
            if values is not None and len(values) != len(x):
                raise ValueError(
                    f"data set {self.name!r} needs one entry of {what} per {split} sample, but has "
                    f"{len(values)} for {len(x)} samples."
                )
        if y.dim() > 1 and y.dtype == torch.uint8:
            self._check_masks(split, y)
            return
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

    def _check_masks(self, split: str, y: Tensor) -> None:
        if self.on_disk:  # too large to scan; checked when they are read
            return
        highest = int(torch.where(y == IGNORED, 0, y).max()) if y.numel() else 0
        if highest >= self.classes:
            raise ValueError(
                f"data set {self.name!r} says it has {self.classes} classes, but a {split} mask "
                f"holds {highest}; classes go from 0 to classes - 1, and {IGNORED} is no class."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def has_images(self) -> bool:
        """Whether samples are images: channels, height and width."""
        return len(self.shape) == 3  # noqa: PLR2004 (as listed)

    @property
    def segmentation(self) -> bool:
        """Whether every pixel has a label."""
        return self.y.dim() > 1

    @property
    def metric(self) -> str:
        """The name of the test metric."""
        return "mean IoU" if self.segmentation else "accuracy"

    def labels(self, *, test: bool = False) -> NDArray[np.int64]:
        """Return one label per sample, for partitions.

        The label of a mask is its most frequent class, counted on every eighth row and column.
        """
        y = self.y_test if test else self.y
        if not self.segmentation:
            return np.asarray(y.cpu().numpy())
        masks = y[:, ::_EVERY, ::_EVERY].cpu().numpy()
        counts = [np.bincount(mask[mask != IGNORED], minlength=1) for mask in masks]
        return np.array([count.argmax() for count in counts], dtype=np.int64)

    def training_batch(
        self, indices: NDArray[np.int64], rng: np.random.Generator | None = None
    ) -> Batch:
        """Return training samples as a model sees them; `rng` augments them."""
        chosen = torch.from_numpy(indices)
        # Twice as fast as `self.x[chosen]`, which matters for small batches.
        x, y = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
        return (
            self.transform.apply_evaluation(x, y)
            if rng is None
            else self.transform.apply_training(x, y, rng)
        )

    def test_batches(self, indices: NDArray[np.int64] | None = None) -> Iterator[Batch]:
        """Yield batches of the given test samples, or of all, as a model sees them."""
        numbers = np.arange(len(self.y_test)) if indices is None else indices
        values = max(1, int(np.prod(self.shape)))
        size = max(1, min(_MOST_SAMPLES, _MOST_VALUES // values))
        for start in range(0, len(numbers), size):
            chosen = torch.from_numpy(numbers[start : start + size])
            yield self.transform.apply_evaluation(self.x_test[chosen], self.y_test[chosen])

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Dataset":
        """Move the data to `device`; batches are of the floating-point type `dtype`.

        Images stay uint8, and arrays mapped from files stay there until a batch is read.
        """
        transform = replace(self.transform, device=device, dtype=dtype)
        if self.on_disk:
            return replace(self, transform=transform)
        kind = dtype if self.x.is_floating_point() else self.x.dtype
        return replace(
            self,
            x=self.x.to(device, kind),
            y=self.y.to(device),
            x_test=self.x_test.to(device, kind),
            y_test=self.y_test.to(device),
            transform=transform,
        )


def check_least(name: str, config: object, hint: str = ".", **least: int) -> None:
    """Raise ValueError, which ends in `hint`, if a field of `config` is below its least value."""
    for field, bound in least.items():
        if (value := getattr(config, field)) is not None and value < bound:
            raise ValueError(
                f"data set {name!r} needs {field} of at least {bound}, but got {value}{hint}"
            )


class DatasetConfig(Protocol):
    """The interface of registered data sets: a frozen dataclass that loads a `Dataset`."""

    def load(self, seed: int) -> Dataset:
        """Return the data; the same seed gives the same data everywhere."""
        ...
