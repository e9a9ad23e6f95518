"""Replies compared with each other: one that is implausibly far from all others is rejected.

The plain mean does what a single client wants, if its values are large enough. So where values are
averaged, a reply is an outlier if something of it is more than `outlier_factor` times the median
over clients, and than `outlier_factor` times a scale of the server's: an update also has to move
the weights by more than their own length, the inputs of a layer also have to exceed the initial
statistics. For all but updates and momentum, in which honest clients differ most, it is a tenth of
`outlier_factor`. Honest clients that differ, a client among others that have nothing left to learn,
and clients that all diverge together are not outliers. Robust rules need no such help.

This bounds what a false reply can do, and does not prevent it: docs/byzantine.md has numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from fednorm.core.algorithm import CombinedReplies
from fednorm.core.messages import LayerStats, RejectedReply, Reply, RunningStats, ServerState
from fednorm.core.moments import Moments
from fednorm.core.replies.validation import Fault, Rejected, sort_by_client
from fednorm.core.strategy import find_rate
from fednorm.core.task import Task
from fednorm.core.types import Tensors

T = TypeVar("T")
_VISIBLE = 0.003  # root mean square; BatchNorm adds its square to variances
_FEWEST = 2  # clients, of which none is usual
_STRICTER = 0.1  # of the factor, where honest clients differ less than in their updates


class Quantity(NamedTuple):
    """Something that replies are compared by."""

    kind: str
    where: str = ""  # the layer or the buffer

    def limit_factor(self, factor: float) -> float:
        """Return how many times the median it may be."""
        return factor if self.kind in {"update", "momentum"} else max(_STRICTER * factor, 1.0)

    def describe(self) -> str:
        """Return it as the beginning of a sentence."""
        return _SENTENCES[self.kind].format(repr(self.where))


_SENTENCES = {
    "update": "its update is",
    "momentum": "its momentum is",
    "buffer": "the change of buffer {} is",
    "inputs": "the inputs of layer {} are",
    "backward": "the backward means of layer {} are",
    "values": "the values of layer {} in a sample are",
}


def reject_outliers(
    task: Task, state: ServerState, good: Sequence[Reply], rejected: Rejected
) -> tuple[list[Reply], Rejected]:
    """Reject replies that are implausibly far from the others; robust rules need no help."""
    sizes: list[dict[Quantity, float]] = [{} for _ in good]
    for reply, own in zip(good, sizes, strict=True):
        if task.aggregator.uses_weights:
            own.update(measure_tensors(reply, state))
        if task.statistics_aggregator.uses_weights:
            own.update(measure_statistics(_find_batches(task, state, reply.stats)))
    scales = _ServerScales(task, state, good)
    found = find_outliers(sizes, task.outlier_factor, scales.find_floor)
    if not found:
        return list(good), rejected
    bad = [RejectedReply(good[i].client, reason, where) for i, (where, reason) in found.items()]
    kept = [reply for i, reply in enumerate(good) if i not in found]
    return kept, sort_by_client((*rejected, *bad))


@dataclass(frozen=True, slots=True)
class _ServerScales:
    """Sizes of what the server has, which are not outliers, however small the others are."""

    task: Task
    state: ServerState
    replies: Sequence[Reply]

    def find_floor(self, quantity: Quantity) -> float:
        """Return the scale of a quantity that a single client may have."""
        if quantity.kind in {"inputs", "backward"}:
            # The initial statistics: false replies could raise the present ones step by step.
            state = self.task.initial_state if quantity.kind == "inputs" else self.state
            running = measure_inputs({quantity.where: state.running[quantity.where]})
            return math.hypot(*running.values(), _VISIBLE)
        if quantity.kind == "buffer":
            buffer = self.state.buffers[quantity.where].double()
            return math.hypot(float(buffer.norm()), math.sqrt(buffer.numel()))
        if quantity.kind == "values":
            return 1.0 if len(self.replies) > _FEWEST else math.inf
        return self._find_step(quantity.kind) / self.task.outlier_factor

    def _find_step(self, kind: str) -> float:
        """Return the length of an update, or momentum, that moves weights by their own length."""
        moving = [reply for reply in self.replies if measure_length(reply.update)]
        usual = find_median(moving or self.replies, lambda reply: measure_length(reply.update))
        task, length = self.task, measure_length(usual.update)
        one = CombinedReplies(usual.update, usual.momentum, rounds=task.rounds, rates=task.rates)
        change = measure_length(task.algorithm.change(self.state, one))
        own = measure_length({name: self.state.weights[name] for name in usual.update})
        step = own * length / change if 0 < change < math.inf else 0.0
        if kind == "update":
            return step
        # Momentum has another unit than updates: the median client says which.
        momentum = find_median([reply.momentum for reply in self.replies], measure_length)
        return step * measure_length(momentum) / length if length else 0.0


def find_median(values: Sequence[T], key: Callable[[T], float]) -> T:
    """Return the median value; of two the smaller one, as the larger may be false.

    >>> find_median([3.0, 1e9, 1.0, 2.0], float)
    2.0
    """
    return sorted(values, key=key)[(len(values) - 1) // 2]


def measure_tensors(reply: Reply, state: ServerState) -> dict[Quantity, float]:
    """Return the lengths of a reply's update and momentum, and of the changes of its buffers."""
    parts = {"update": reply.update, "momentum": reply.momentum}
    sizes = {Quantity(kind): measure_length(part) for kind, part in parts.items() if part}
    for name, value in reply.buffers.items():
        change = value.double() - state.buffers[name].double()
        sizes[Quantity("buffer", name)] = float(change.norm())
    return sizes


def measure_length(tensors: Tensors) -> float:
    """Return the length of several tensors as one vector."""
    if not tensors:
        return 0.0
    lengths = torch._foreach_norm(list(tensors.values()))  # noqa: SLF001 (one batched call)
    return math.hypot(*torch.stack(lengths).tolist())


def _find_batches(
    task: Task, state: ServerState, stats: Mapping[str, LayerStats]
) -> Mapping[str, LayerStats]:
    """Return the statistics of a client's batches, which it may have mixed into running ones.

    Running statistics hold the server's as well, which all clients would share with a false one.
    """
    if task.strategy.statistics == "pool" or task.strategy.calibration != "never":
        return stats
    found = {}
    for path, report in stats.items():
        before, own = state.running[path], report.moments
        rate = find_rate(before, report.num_batches, task.layout.sharing[path].momentum)
        if rate > 0:
            mean, var = (
                old.double() + (new.double() - old.double()) / rate
                for old, new in ((before.mean, own.mean), (before.var, own.var))
            )
            own = replace(own, mean=mean, var=var)
        # Their count is that of batches, in which clients of unequal size differ at will.
        count = report.samples if own.count > 0 else 0.0
        found[path] = replace(report, moments=replace(own, count=count))
    return found


def measure_statistics(stats: Mapping[str, LayerStats]) -> dict[Quantity, float]:
    """Return the root mean square of layers' inputs, and how many values a sample has."""
    present = {path: report for path, report in stats.items() if report.moments.count > 0}
    sizes = measure_inputs({path: report.moments for path, report in present.items()})
    for path, report in present.items():
        more = [measure_inputs({path: moments}) for moments in report.more]
        for quantity, size in (pair for found in more for pair in found.items()):
            sizes[quantity] = max(sizes[quantity], size)
        largest = max(moments.count for moments in report.calls)
        sizes[Quantity("values", path)] = float(largest / report.samples)
    return sizes


def measure_inputs(stats: Mapping[str, Moments | RunningStats]) -> dict[Quantity, float]:
    """Return the root mean square over the channels of each layer.

    Of all channels together: one that is constant on most clients, or without values, has no scale.
    """
    if not stats:
        return {}
    means = torch._foreach_norm([one.mean for one in stats.values()])  # noqa: SLF001 (as above)
    variances = torch._foreach_norm([one.var for one in stats.values()], 1)  # noqa: SLF001 (as above)
    sizes = {}
    pairs = zip(torch.stack(means).tolist(), torch.stack(variances).tolist(), strict=True)
    for (path, one), (length, total) in zip(stats.items(), pairs, strict=True):
        kind = "inputs" if one.var.numel() else "backward"
        size = math.hypot(length, math.sqrt(total)) / math.sqrt(one.mean.numel())
        sizes[Quantity(kind, path)] = size
    return sizes


def find_outliers(
    sizes: Sequence[Mapping[Quantity, float]], factor: float, floor: Callable[[Quantity], float]
) -> dict[int, Fault]:
    """Return the replies, by position, of which something is too large, and what.

    That is more than the quantity's factor times the median, and as many times its `floor`.

    >>> sizes = [{Quantity("update"): size} for size in (1.0, 3.0, 2.0, 1e9)]
    >>> find_outliers(sizes, 1000.0, lambda _: 0.0)
    {3: ('', 'its update is 5e+08 times as large as the median over clients')}
    """
    found: dict[int, Fault] = {}
    for quantity in dict.fromkeys(quantity for own in sizes for quantity in own):
        present = [own[quantity] for own in sizes if quantity in own]
        median = find_median(present, float)
        own_factor = quantity.limit_factor(factor)
        if max(present) <= own_factor * median:
            continue
        limit = own_factor * max(median, floor(quantity))
        for position, own in enumerate(sizes):
            if own.get(quantity, 0.0) > limit:
                ratio = own[quantity] / median if median else math.inf
                said = (
                    f"{quantity.describe()} {ratio:.3g} times as large as the median over clients"
                )
                found.setdefault(position, (quantity.where, said))
    return found


def reject_largest(
    good: Sequence[Reply], rejected: Rejected, fault: Fault
) -> tuple[list[Reply], Rejected]:
    """Reject the reply that is largest where the merged state is not finite."""
    where, reason = fault

    def measure(reply: Reply) -> float:
        calls = reply.stats[where].calls if where in reply.stats else ()
        sizes = [size for m in calls for size in measure_inputs({where: m}).values()]
        return max(sizes, default=0.0) or measure_length(reply.update)

    worst = max(good, key=measure)
    bad = RejectedReply(worst.client, reason, where)
    kept = [reply for reply in good if reply is not worst]
    return kept, sort_by_client((*rejected, bad))
