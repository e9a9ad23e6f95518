"""The check that every reply passes before it is used.

A reply is used as a whole or not at all. Its update and its buffers have exactly the tensors that
the server expects, in shape, number format and device; its statistics belong to layers that report
in this round; everything is finite, variances are not negative, and it counts no more than the
client can have. Two things may be absent: the statistics of a layer that the client did not use,
and the momentum of a parameter that got no gradient. Neither carries a value, so neither can do
harm.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fednorm.core.messages import (
    LARGEST,
    Claim,
    LayerStats,
    RejectedReply,
    Reply,
    RunningStats,
    ServerState,
)
from fednorm.core.moments import Moments
from fednorm.core.types import ClientId, Tensors

Rejected: TypeAlias = tuple[RejectedReply, ...]
Fault: TypeAlias = tuple[str, str]  # the layer or tensor, and what is wrong

_LONGEST = 300  # letters of a reason, which may quote the reply
_ROUNDING = 1 + 1e-6  # counts are sums of weighted counts
_UNBOUNDED = Claim()
INVALID_CLIENT: ClientId = -1  # replaces an invalid client id


def _find_no_ranges(_batches: int) -> Mapping[str, tuple[float, float]]:
    return {}


@dataclass(frozen=True, slots=True)
class ReplySchema:
    """What a reply to one broadcast holds; of tensors only the shape and number format count."""

    update: Tensors
    buffers: Tensors = field(default_factory=dict)
    running: Mapping[str, RunningStats] = field(default_factory=dict)  # layers that may report
    momentum: Tensors = field(default_factory=dict)  # that may be sent
    clients: frozenset[ClientId] | None = None  # that were asked, if known
    claims: Mapping[ClientId, Claim] = field(default_factory=dict)  # as far as they are known
    counts_values: bool = True  # reports count values; otherwise batches
    combined: bool = False  # a reply may be the sum of several clients'
    # The range of single numbers among `momentum`, after a number of batches.
    ranges: Callable[[int], Mapping[str, tuple[float, float]]] = _find_no_ranges
    round: int | None = None


def validate_replies(
    replies: Sequence[Reply], expected: ReplySchema
) -> tuple[list[Reply], Rejected]:
    """Sort replies into usable ones, in the order of their clients, and rejected ones.

    Of several usable replies of one client the first is taken.
    """
    good: dict[ClientId, Reply] = {}
    bad: list[RejectedReply] = []
    for reply in replies:
        client = reply.client if isinstance(reply, Reply) else INVALID_CLIENT
        found = find_fault(reply, expected)
        if found is None and client in good:
            found = ("", "it has answered already")
        if found is None:
            good[client] = reply
        else:
            known = client if _is_whole(client) else INVALID_CLIENT
            where, reason = (text[:_LONGEST] for text in found)
            bad.append(RejectedReply(known, reason, where))
    return [good[c] for c in sorted(good)], sort_by_client(bad)


def reject_incomplete(
    good: Sequence[Reply], rejected: Sequence[RejectedReply]
) -> tuple[list[Reply], Rejected]:
    """Reject replies without what most others hold, for rules that trust no single client.

    Otherwise one Byzantine client could block a layer's aggregation by omitting it.
    """
    kept, bad = [], list(rejected)
    held = [_list_layers(reply) | set(reply.momentum) for reply in good]
    counted = Counter(name for names in held for name in names)
    usual = {name for name, count in counted.items() if 2 * count > len(good)}
    for reply, names in zip(good, held, strict=True):
        if missing := sorted(usual - names):
            reason = f"it omits {missing[0]!r}, which most others report"
            bad.append(RejectedReply(reply.client, reason, where=missing[0]))
        else:
            kept.append(reply)
    return kept, sort_by_client(bad)


def sort_by_client(rejected: Iterable[RejectedReply]) -> Rejected:
    """Return rejected replies in the order of their clients."""
    return tuple(sorted(rejected, key=lambda one: one.client))


def _list_layers(reply: Reply) -> set[str]:
    """Return the layers that a reply has statistics of; a count of 0 is none."""
    return {path for path, report in reply.stats.items() if report.moments.count > 0}


def list_clients(replies: Iterable[Reply | RejectedReply]) -> set[ClientId]:
    """Return the clients that sent these replies."""
    return {one.client for one in replies}


def find_fault(reply: Reply, expected: ReplySchema) -> Fault | None:
    """Return why a reply cannot be used, or None."""
    try:
        return next(_find_faults(reply, expected), None)
    except Exception as error:  # noqa: BLE001 (a reply that cannot be read is a bad reply)
        return "", f"it cannot be read: {type(error).__name__}: {error}"


def _find_faults(reply: Any, expected: ReplySchema) -> Iterator[Fault]:
    if not isinstance(reply, Reply):
        yield "", f"it is not a reply but {_name_type(reply)}"
    if not _is_whole(reply.client):
        yield "", f"its client is {reply.client!r}, which is not the number of a client"
    if expected.clients is not None and reply.client not in expected.clients:
        yield "", "it was not asked in this round"
    if reply.fault:
        yield "", reply.fault
    if reply.clients != 1 and not expected.combined:
        yield "", f"it claims to combine {reply.clients!r} clients"
    if reply.round not in {None, expected.round}:
        yield "", f"it answers round {reply.round!r} instead of {expected.round}"
    claim = expected.claims.get(reply.client, _UNBOUNDED)
    yield from _check_examples(reply.examples, claim.examples)
    yield from _check_metrics(reply)
    yield from _compare_tensors("update", reply.update, expected.update)
    yield from _compare_tensors("buffer", reply.buffers, expected.buffers)
    yield from _compare_tensors("momentum", reply.momentum, expected.momentum, complete=False)
    yield from _check_ranges(reply.momentum, expected.ranges(claim.batches))
    yield from _check_statistics(reply.stats, expected, claim)
    floats = {n: t for n, t in reply.buffers.items() if t.is_floating_point()}
    for part in (reply.update, reply.momentum, floats):
        if (name := _check_finite(part)) is not None:
            yield name, f"the update of {name!r} is not finite"


def _check_metrics(reply: Reply) -> Iterator[Fault]:
    if not isinstance(reply.metrics, Mapping):
        yield "", f"its metrics are {_name_type(reply.metrics)}, not a mapping"
    if not (_is_number(reply.loss) and math.isfinite(reply.loss)):
        yield "", f"its loss is {reply.loss!r}"


def _check_examples(examples: Any, most: int) -> Iterator[Fault]:
    if not (_is_whole(examples) and 0 < examples <= LARGEST):
        yield "", f"it reports {examples!r} examples"
    if examples > most:
        yield "", f"it reports {examples} examples, but can have {most} at most"


def _compare_tensors(
    what: str, tensors: Any, expected: Tensors, *, complete: bool = True
) -> Iterator[Fault]:
    """Compare tensors with those that are expected, by name, shape, format and device."""
    if not isinstance(tensors, Mapping):
        yield "", f"its {what} is {_name_type(tensors)}, not a mapping"
    if extra := [name for name in tensors if name not in expected]:
        yield str(extra[0]), f"its {what} has {extra[0]!r}, which is not expected"
    if complete and (missing := sorted(expected.keys() - tensors.keys())):
        yield missing[0], f"its {what} lacks {missing[0]!r}"
    for name, tensor in tensors.items():
        yield from _compare_tensor(f"the {what} of {name!r}", name, tensor, expected[name])


def _compare_tensor(what: str, where: str, tensor: Any, like: Tensor) -> Iterator[Fault]:
    if not isinstance(tensor, Tensor):
        yield where, f"{what} is {_name_type(tensor)}, not a tensor"
    if tensor.shape != like.shape:
        yield where, f"{what} has the shape {tuple(tensor.shape)} instead of {tuple(like.shape)}"
    if tensor.dtype != like.dtype:
        yield where, f"{what} is {tensor.dtype} instead of {like.dtype}"
    if tensor.requires_grad:
        yield where, f"{what} is part of a computation that is not finished"
    if (tensor.device, tensor.layout) != (like.device, torch.strided):
        yield where, f"{what} is on {tensor.device} ({tensor.layout}) instead of {like.device}"


def _check_ranges(numbers: Tensors, ranges: Mapping[str, tuple[float, float]]) -> Iterator[Fault]:
    for name in numbers.keys() & ranges.keys():
        least, most = ranges[name]
        if not least / _ROUNDING <= (value := float(numbers[name])) <= most * _ROUNDING:
            yield name, f"its {name!r} is {value:g}, but must be from {least:g} to {most:g}"


def _check_statistics(stats: Any, expected: ReplySchema, claim: Claim) -> Iterator[Fault]:
    if not isinstance(stats, Mapping):
        yield "", f"its statistics are {_name_type(stats)}, not a mapping"
    for path, report in stats.items():
        if path not in expected.running:
            yield str(path), f"layer {path!r} has nothing to report in this round"
        yield from _check_report(path, report, expected.running[path])
        yield from _check_claim(path, report, expected, claim)
    yield from _check_moments({path: report.moments for path, report in stats.items()})
    for path, report in stats.items():
        for moments in report.more:
            yield from _check_moments({path: moments})


def _check_moments(stats: Mapping[str, Moments]) -> Iterator[Fault]:
    if (layer := _check_size({path: moments.mean for path, moments in stats.items()})) is not None:
        yield layer, f"the mean of layer {layer!r} is not finite, or its square is not"
    variances = {path: moments.var for path, moments in stats.items() if moments.var.numel()}
    if (layer := _check_finite(variances)) is not None:
        yield layer, f"the variance of layer {layer!r} is not finite"
    if variances and float(torch.cat(list(variances.values())).min()) < 0:  # one look at all
        layer = next(path for path, var in variances.items() if float(var.min()) < 0)
        yield layer, f"the variance of layer {layer!r} is negative"


def _check_report(path: str, report: Any, before: RunningStats) -> Iterator[Fault]:
    if not (isinstance(report, LayerStats) and isinstance(report.more, tuple)):
        yield path, f"the report of layer {path!r} is {_name_type(report)}, not moments"
    if not (_is_whole(report.num_batches) and report.num_batches > before.num_batches):
        yield path, _describe_counter(path, report, before)
    if not (_is_number(report.samples) and 1 <= report.samples <= LARGEST):
        yield path, f"the samples of layer {path!r} are {report.samples!r}"
    if report.more and len(report.calls) > report.num_batches - before.num_batches:
        yield path, f"layer {path!r} has {len(report.calls)} calls in a step, more than batches"
    for moments in report.calls:
        if not isinstance(moments, Moments):
            yield path, f"the report of layer {path!r} is {_name_type(moments)}, not moments"
        if not (_is_number(moments.count) and 0 <= moments.count <= LARGEST):
            yield path, f"the count of layer {path!r} is {moments.count!r}"
        yield from _compare_tensor(f"the mean of layer {path!r}", path, moments.mean, before.mean)
        yield from _compare_tensor(f"the variance of layer {path!r}", path, moments.var, before.var)


def _describe_counter(path: str, report: LayerStats, before: RunningStats) -> str:
    return f"the counter of layer {path!r} is {report.num_batches!r} after {before.num_batches}"


def _check_claim(
    path: str, report: LayerStats, expected: ReplySchema, claim: Claim
) -> Iterator[Fault]:
    """Compare what a report counts with what the client can have counted."""
    before = expected.running[path]
    if report.num_batches > (most := claim.limit_counter(path, before.num_batches)):
        yield path, f"{_describe_counter(path, report, before)}, but can be {most} at most"
    samples = report.samples if expected.counts_values else None
    if samples is not None and samples > claim.samples * _ROUNDING:
        yield path, f"the samples of layer {path!r} are {samples}, but {claim.samples} at most"
    most_values = claim.limit_count(path, samples)
    for moments in report.calls:
        if moments.count > most_values * _ROUNDING:
            yield path, f"the count of layer {path!r} is {moments.count}, but {most_values} at most"


def _check_finite(tensors: Tensors) -> str | None:
    """Return the name of a tensor with a NaN or an infinity in it, if there is one."""
    present = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    # A sum with a NaN or an infinity in it is not finite. Of values that all are finite it may
    # overflow: then each is looked at.
    sums = [tensor.sum() for tensor in present.values()]
    if not sums or math.isfinite(sum(torch.stack(sums).tolist())):
        return None
    return next((name for name, t in present.items() if not t.isfinite().all()), None)


def _check_size(tensors: Tensors) -> str | None:
    """Return the name of a tensor of which the square of a difference may not be finite.

    The variance between clients needs that.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not present:
        return None
    # The largest magnitude of each tensor, in one batched call.
    magnitudes = torch._foreach_norm(list(present.values()), float("inf"))  # noqa: SLF001
    for name, largest in zip(present, torch.stack(magnitudes).tolist(), strict=True):
        if not largest <= math.sqrt(torch.finfo(present[name].dtype).max) / 4:
            return name
    return None


def find_state_fault(state: ServerState) -> Fault | None:
    """Return what of a merged state is not finite, or None; each reply may be and the sum not."""
    floats = {name: t for name, t in state.buffers.items() if t.is_floating_point()}
    kept = state.optimizer.values()
    for part in (state.weights, state.momentum, floats, state.strategy_state, *kept):
        if (name := _check_finite(part)) is not None:
            return name, f"with it {name!r} would not be finite at the server"
    merged = {path: Moments(1.0, r.mean, r.var) for path, r in state.running.items()}
    fault = next(_check_moments(merged), None)
    return fault and (fault[0], f"with it {fault[1]} at the server")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name_type(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
