"""A data set as a value: training and test tensors, and the natural group of every sample.

What a user gives becomes tensors here, or a sentence says what does not fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednorm.core.targets import MAIN, Target, find_target
from fednorm.data.transforms import IDENTITY, IGNORED, Batch, BatchTransform
from fednorm.errors import ConfigError

_BINS = 10  # of numbers that are divided by their size
_EVERY = 8  # every eighth pixel of a mask is counted
_MOST_SAMPLES, _MOST_VALUES = 1000, 4_000_000  # of a test batch


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples and labels to train on, and those to test on.

    Attributes:
        name: the name it is registered under.
        x: training samples, one per row: floats, images as uint8, or token ids as int64.
        y: their labels, int64, in `range(classes)`, one per sample or per position of a sequence;
            for segmentation, uint8 masks in which 255 marks a pixel without a label; floats for
            regression; floats that are 0 or 1, one per label, for several labels per sample.
        x_test: test samples.
        y_test: their labels.
        classes: the number of classes, or of outputs.
        groups: the natural group (writer, city, hospital) of each training sample, if known.
        groups_test: the same for each test sample.
        transform: applied to a batch before a model sees it.
        on_disk: whether the samples are mapped from a file, being too large for memory.
        target: what the targets are; found from the training targets if not given.
        given: whether the user's data come divided, so that only "natural" keeps the clients.
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
    target: Target | None = None
    given: bool = False

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.target is None:
            object.__setattr__(self, "target", find_target(self.y))
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
        if self.target in ("values", "labels") and y.is_floating_point():
            self._check_numbers(split, y)
            return
        if self.target == "tokens":  # a negative one is left out
            y = y.clamp(min=0)
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

    def _check_numbers(self, split: str, y: Tensor) -> None:
        outputs = int(np.prod(y.shape[1:]))
        if outputs != self.classes and self.y.shape[1:] == y.shape[1:]:
            raise ValueError(
                f"data set {self.name!r} says it has {self.classes} outputs, but a {split} sample "
                f"has {outputs} targets; set classes to their number."
            )
        if y.shape[1:] != self.y.shape[1:]:
            raise ValueError(
                f"data set {self.name!r} needs {split} targets of shape {tuple(self.y.shape[1:])} "
                f"per sample, but has {tuple(y.shape[1:])}."
            )
        if not bool(torch.isfinite(y).all()):
            raise ValueError(
                f"data set {self.name!r} has {split} targets that are NaN or infinite; drop those "
                "samples."
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
        return self.target == "mask"

    @property
    def has_classes(self) -> bool:
        """Whether samples, or their pixels, belong to classes, which partitions can divide by."""
        return self.target in ("class", "mask") or (self.target == "values" and self.y.dim() == 1)

    @property
    def metric(self) -> str:
        """The name of the main test figure."""
        return MAIN[self.target or "class"].name

    def labels(self, *, test: bool = False) -> NDArray[np.int64]:
        """Return one label per sample, for partitions.

        The label of a mask is its most frequent class, counted on every eighth row and column; that
        of a number is its tenth among the training targets: 0 for the smallest. Other targets have
        no classes: all are 0.
        """
        y = self.y_test if test else self.y
        if self.target == "class":
            return np.asarray(y.cpu().numpy())
        if not self.has_classes:
            return np.zeros(len(y), dtype=np.int64)
        if self.target == "values":
            edges = np.quantile(self.y.cpu().numpy(), np.arange(1, _BINS) / _BINS)
            return np.searchsorted(edges, y.cpu().numpy(), side="right").astype(np.int64)
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

        Images stay uint8, token ids integers, and arrays mapped from files stay there until a batch
        is read.
        """
        transform = replace(self.transform, device=device, dtype=dtype)
        if self.on_disk:
            return replace(self, transform=transform)

        def move(part: Tensor) -> Tensor:
            return part.to(device, dtype if part.is_floating_point() else part.dtype)

        return replace(
            self,
            x=move(self.x),
            y=move(self.y),
            x_test=move(self.x_test),
            y_test=move(self.y_test),
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


_MATRIX = 2  # dimensions


def describe(value: Any) -> str:
    """Say what a value is.

    >>> describe([1, 2]), describe(torch.zeros(3))
    ('of type list, length 2', 'of type Tensor, shape (3,)')
    """
    shape = getattr(value, "shape", None)
    size = f", shape {tuple(shape)}" if shape is not None else ""
    count = f", length {len(value)}" if isinstance(value, list | tuple) else ""
    return f"of type {type(value).__name__}{size}{count}"


def to_array_channels_first(value: Any) -> NDArray[Any]:
    """Return an array; an image gets its channels first."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    array = np.asarray(value)
    picture = hasattr(value, "getbands")  # of Pillow
    if picture:
        array = array[None] if array.ndim == _MATRIX else np.moveaxis(array, -1, 0)
    return array


def stack(rows: Sequence[NDArray[Any]], where: str) -> NDArray[Any]:
    """Return rows of one shape as an array."""
    shapes = sorted({row.shape for row in rows})
    if len(shapes) > 1:
        raise ConfigError(
            f"data: samples of {where} have one shape, but there are {shapes[0]} and {shapes[-1]}; "
            "pad or resize them."
        )
    return np.stack(rows)


def _to_tensor(value: Any, what: str, where: str) -> Tensor:
    """Return a tensor on the CPU; refuse what holds no numbers."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:  # rows of several lengths
            raise ConfigError(
                f"data: {what} of {where} are no array: {error}; pad or resize them."
            ) from None
        if array.dtype.kind in "OSU":
            example = array.flat[0] if array.size else ""
            raise ConfigError(
                f"data: {what} of {where} are no numbers, but such as {str(example)!r}; number "
                "classes from 0 on, for example with numpy.unique(y, return_inverse=True)[1], and "
                "turn text into token ids."
            )
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"data: {what} of {where} are of type {array.dtype}; use floats.")
        wide = array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array
        tensor = torch.from_numpy(np.array(wide))  # a copy: theirs may change, or be read-only
    if tensor.is_complex() or not tensor.dim():
        raise ConfigError(
            f"data: {what} of {where} are one real number or array per row, but they are "
            f"{describe(value)}."
        )
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = (
            (~torch.isfinite(tensor)).flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite()
        )
        first = int(bad.int().argmax())
        raise ConfigError(
            f"data: {what} of {where} hold NaN or infinite values in {int(bad.sum())} of "
            f"{len(bad)} rows, the first in row {first}; drop those rows, or fill them in."
        )
    return tensor


def read_inputs(x: Any, where: str) -> Tensor:
    """Return samples: bytes are images, other integers token ids, the rest is float32."""
    tensor = _to_tensor(x, "samples", where)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    return tensor.long()


def read_targets(y: Any, where: str) -> Tensor:
    """Return targets as a `Dataset` holds them."""
    tensor = _to_tensor(y, "targets", where)
    if tensor.dim() == _MATRIX and tensor.shape[1] == 1 and not tensor.is_floating_point():
        tensor = tensor[:, 0]
    if tensor.is_floating_point():
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    if tensor.dim() == _MATRIX:
        several = bool(((tensor == 0) | (tensor == 1)).all())
        return tensor.float() if several else tensor.long()
    if tensor.dim() > _MATRIX:  # masks
        wide = tensor.long()
        if wide.numel() and int(wide.max()) > IGNORED:
            raise ConfigError(
                f"data: masks of {where} have classes below {IGNORED}, but one pixel is "
                f"{int(wide.max())}; renumber them."
            )
        return wide.masked_fill(wide < 0, IGNORED).to(torch.uint8)
    labels = tensor.long()
    if len(labels) and int(labels.min()) < 0:
        raise ConfigError(
            f"data: targets of {where} are classes from 0 on, but one is {int(labels.min())}; "
            "renumber them, or pass floats for regression."
        )
    return labels
