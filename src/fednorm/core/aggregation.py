"""The interface of aggregators, and the weighted mean, which is the default."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.core.types import Tensors


class Aggregator(ABC):
    """Combines the clients' values of one tensor: `[clients, *shape]` becomes `[*shape]`."""

    # Whether the weights that clients report are trusted. If not, the aggregator is robust: it
    # ignores them, and reported counts and counters are not trusted either.
    uses_weights: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate over the first axis; a robust rule ignores the client-reported weights."""

    def check(self, n: int) -> None:  # noqa: B027 (any number is enough, unless a rule overrides it)
        """Raise ValueError unless `n` clients are enough."""

    def without(self, faulty: int) -> "Aggregator":  # noqa: ARG002 (for rules that count them)
        """Return the rule with its Byzantine budget lowered by the `faulty` replies rejected."""
        return self


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """The mean over clients, weighted by what each reports: FedAvg's aggregator.

    >>> WeightedMean()(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    tensor([2.])
    """

    uses_weights: ClassVar[bool] = True

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the mean over clients, weighted by `weights`."""
        if len(values) == 1:
            return values[0]
        share = (weights / weights.sum()).to(values)
        mean: Tensor = torch.tensordot(share, values, dims=1)
        return mean


weighted_mean = WeightedMean()


def has_quorum(aggregate: Aggregator, n: int) -> bool:
    """Return whether `n` clients are enough for a rule."""
    try:
        aggregate.check(n)
    except ValueError:
        return False
    return n > 0


def combine_tensors(
    parts: Sequence[Tensors], examples: Sequence[int], aggregate: Aggregator
) -> dict[str, Tensor]:
    """Combine the clients' tensors by name, each over the clients that sent it.

    A robust rule leaves out tensors that too few clients sent.
    """
    if len(parts) == 1 and aggregate.uses_weights:
        return dict(parts[0])
    merged: dict[str, Tensor] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    groups: dict[tuple[torch.dtype, tuple[int, ...]], list[str]] = {}
    for name in names:
        having = tuple(i for i, part in enumerate(parts) if name in part)
        groups.setdefault((parts[having[0]][name].dtype, having), []).append(name)
    for (dtype, having), alike in groups.items():
        if not has_quorum(aggregate, len(having)):
            continue
        senders = [parts[i] for i in having]
        weights = torch.tensor([examples[i] for i in having], dtype=torch.float64)
        if not dtype.is_floating_point:
            merged |= {name: _whole(_stack(senders, name), aggregate) for name in alike}
        elif aggregate.uses_weights:
            merged |= {name: aggregate(_stack(senders, name), weights) for name in alike}
        else:
            merged |= _combine_as_one_vector(senders, alike, weights, aggregate)
    return {name: merged[name] for name in names if name in merged}


def _stack(parts: Sequence[Tensors], name: str) -> Tensor:
    return torch.stack([part[name] for part in parts])


def _combine_as_one_vector(
    parts: Sequence[Tensors], names: Sequence[str], weights: Tensor, aggregate: Aggregator
) -> Mapping[str, Tensor]:
    shapes = [parts[0][name].shape for name in names]
    sizes = [shape.numel() for shape in shapes]
    rows = parts[0][names[0]].new_empty(len(parts), sum(sizes))
    for row, part in zip(rows, parts, strict=True):
        torch.cat([part[name].flatten() for name in names], out=row)
    pieces = torch.split(aggregate(rows, weights), sizes)
    return {
        # Copied: each tensor can be kept or saved by itself.
        name: piece.view(shape).clone()
        for name, piece, shape in zip(names, pieces, shapes, strict=True)
    }


def _whole(values: Tensor, aggregate: Aggregator) -> Tensor:
    """Combine integers, which are indices and counters: an average of them means nothing.

    It is the maximum, or the median for a robust rule, which Byzantine clients cannot move at will.
    """
    if aggregate.uses_weights:
        return values.amax(0)
    return values.sort(0).values[(len(values) - 1) // 2]
