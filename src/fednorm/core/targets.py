"""Kinds of targets: the loss that a model trains on, and the figures that a test measures.

A loss is a function (outputs, targets) -> the mean over the samples of a batch. FedAvg weighs
clients by their samples, and `dualbn` scales gradients back to one sample: both need that mean.

Every main figure is a fraction of which 1 is perfect and more is better, so that tables, ranks and
headlines treat all alike: accuracy, mean IoU, the coefficient of determination R², and F1.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.algorithm import Loss

# A class per sample, per position of a sequence, per pixel; numbers; several labels per sample.
Target: TypeAlias = Literal["class", "tokens", "mask", "values", "labels"]


def find_target(y: Tensor) -> Target:
    """Return what targets are, by their type and shape.

    >>> find_target(torch.tensor([0, 2])), find_target(torch.rand(2, 3))
    ('class', 'values')
    >>> find_target(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    'labels'
    """
    if y.is_floating_point():
        matrix = y.dim() == 2 and y.shape[1] > 1  # noqa: PLR2004 (samples and labels)
        return "labels" if matrix and bool(((y == 0) | (y == 1)).all()) else "values"
    if y.dim() <= 1:
        return "class"
    return "tokens" if y.dim() == 2 and y.dtype != torch.uint8 else "mask"  # noqa: PLR2004


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error; outputs [n, 1] fit targets [n].

    >>> float(mean_squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])))
    2.0
    """
    return functional.mse_loss(match_shape(outputs, targets), targets)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of scores before the sigmoid."""
    return functional.binary_cross_entropy_with_logits(match_shape(outputs, targets), targets)


def drop_last_axis(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs [n, 1] as [n] if the targets are n numbers; torch would broadcast them."""
    alone = outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1
    return outputs.squeeze(-1) if alone and targets.is_floating_point() else outputs


def match_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of the targets, or raise an error."""
    same = drop_last_axis(outputs, targets)
    if same.shape != targets.shape:
        raise ValueError(
            f"a model for targets of shape {tuple(targets.shape)} gives one number for each, but "
            f"its outputs are {tuple(outputs.shape)}."
        )
    return same


LOSSES: Mapping[Target, Loss] = {
    "class": functional.cross_entropy,
    "tokens": functional.cross_entropy,
    "mask": functional.cross_entropy,
    "values": mean_squared_error,
    "labels": binary_cross_entropy,
}
# Means over samples whatever the batch; with targets left out they are means over the rest.
SAMPLE_MEANS = frozenset(LOSSES.values())

Metric: TypeAlias = Any  # (outputs, targets) -> number, or an object with update, compute, reset


class Tally(Protocol):
    """Takes a test set batch by batch."""

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""

    @property
    def value(self) -> float:
        """The figure of all batches so far."""


class Accuracy:
    """The share of samples, or positions, whose highest score is that of their label.

    A negative label does not count.
    """

    name = "accuracy"

    def __init__(self) -> None:
        self.right = self.samples = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: one score per class, and one label, for each sample or position."""
        known = targets >= 0
        self.right += int(((outputs.argmax(1) == targets) & known).sum())
        self.samples += int(known.sum())

    @property
    def value(self) -> float:
        """The accuracy so far; 0 if there is no label."""
        return self.right / max(1, self.samples)


class MeanIoU:
    """Intersection over union of predicted and labelled pixels, averaged over classes.

    A pixel with a negative label does not count. A class that is neither predicted nor labelled in
    any image has no union, and is left out of the average.
    """

    name = "mean IoU"

    def __init__(self) -> None:
        self.confusion: Tensor | None = None  # rows: labels, columns: predictions

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: one score per class, and one label, for each pixel."""
        classes = outputs.shape[1]
        known = targets >= 0
        pairs = targets[known] * classes + outputs.argmax(1)[known]
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).cpu()
        self.confusion = counts if self.confusion is None else self.confusion + counts

    @property
    def value(self) -> float:
        """The mean over classes so far; 0 if no pixel has a label."""
        if self.confusion is None or not self.confusion.sum():
            return 0.0
        matrix = self.confusion.double()
        both = matrix.diag()
        union = matrix.sum(0) + matrix.sum(1) - both
        seen = union > 0
        return float((both[seen] / union[seen]).mean())


class R2:
    """The coefficient of determination: 1 - squared error / variance, averaged over outputs.

    1 is perfect, 0 is as good as the mean of the test targets; worse than that is negative. An
    output whose targets are all equal counts 1 if it is predicted exactly, else 0.
    """

    name = "R²"

    def __init__(self) -> None:
        self.count = 0
        self.origin: Tensor | None = None  # near the targets, for stable sums of squares
        self.sums: Tensor | None = None  # of errors², of targets, of targets²; by output

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: one number for each target."""
        y = targets.double().flatten(1) if targets.dim() > 1 else targets.double().unsqueeze(1)
        errors = match_shape(outputs, targets).double().view_as(y) - y
        if self.origin is None:
            self.origin = y.mean(0)
        near = y - self.origin
        sums = torch.stack([errors.square().sum(0), near.sum(0), near.square().sum(0)])
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += len(y)

    @property
    def value(self) -> float:
        """R² so far."""
        if self.sums is None:
            return 0.0
        error, total, squares = self.sums
        spread = squares - total.square() / self.count
        constant = spread <= 1e-12 * squares.clamp(min=1e-300)
        varied = 1 - error / spread.masked_fill(constant, 1)
        return float(torch.where(constant, (error == 0).double(), varied).mean())


class F1:
    """F1 over all labels of all samples together; a score above 0 predicts a label."""

    name = "F1"

    def __init__(self) -> None:
        self.both = self.either = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: one score before the sigmoid, and 0 or 1, for each label."""
        found, true = match_shape(outputs, targets) > 0, targets > 0.5  # noqa: PLR2004 (0 or 1)
        self.both += int((found & true).sum())
        self.either += int(found.sum()) + int(true.sum())

    @property
    def value(self) -> float:
        """F1 so far; 0 if nothing is labelled or predicted."""
        return 2 * self.both / max(1, self.either)


class _Collected:
    """A function that is called once with the whole test set."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.batches = metric, list[tuple[Tensor, Tensor]]()

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.batches.append((outputs, targets))

    @property
    def value(self) -> float:
        outputs, targets = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        return _read_number(self.metric(outputs, targets))


class _Accumulated:
    """An object with update, compute and reset, as torchmetrics has them."""

    def __init__(self, metric: Metric) -> None:
        self.metric = deepcopy(metric)
        self.metric.reset()

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        if hasattr(self.metric, "to"):
            self.metric = self.metric.to(outputs.device)
        self.metric.update(outputs, targets)

    @property
    def value(self) -> float:
        return _read_number(self.metric.compute())


def accumulates(metric: Metric) -> bool:
    """Return whether a metric takes batches one by one, as those of torchmetrics do."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _read_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"values of shape {tuple(shape)}"
        raise ValueError(f"it must return one number, but returned {what}.") from None


MAIN: Mapping[Target, type[Accuracy | MeanIoU | R2 | F1]] = {
    "class": Accuracy,
    "tokens": Accuracy,
    "mask": MeanIoU,
    "values": R2,
    "labels": F1,
}


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a test measures: the main figure, and others by name."""

    target: Target | None = None  # None: found from the targets
    named: Mapping[str, Metric] = field(default_factory=dict)

    def start(self, targets: Tensor) -> tuple[Tally, dict[str, Tally]]:
        """Return new tallies; `targets` are those of the first batch."""
        named: dict[str, Tally] = {
            name: _Accumulated(metric) if accumulates(metric) else _Collected(metric)
            for name, metric in self.named.items()
        }
        return MAIN[self.target or find_target(targets)](), named


DEFAULT_METRICS = Metrics()
