"""The check that every reply passes before it is used."""

import math
from collections.abc import Iterator, Sequence

import torch

from fednorm.core.messages import Rejected, Reply
from fednorm.core.types import Tensors


def _not_finite(tensors: Tensors) -> str | None:
    """Return the name of a tensor with a NaN or an infinity in it, if there is one."""
    if not tensors:
        return None
    # The largest magnitude of each tensor shows whether all of it is finite, in one batched call.
    magnitudes = torch._foreach_norm(list(tensors.values()), float("inf"))  # noqa: SLF001
    largest = torch.stack(magnitudes)
    finite = torch.isfinite(largest).tolist()
    return next((name for name, ok in zip(tensors, finite, strict=True) if not ok), None)


def fault(reply: Reply) -> str | None:
    """Return why a reply cannot be used, or None."""
    return next(_faults(reply), None)


def _faults(reply: Reply) -> Iterator[str]:
    if reply.examples <= 0:
        yield f"it reports {reply.examples} examples"
    moments = {path: report.moments for path, report in reply.stats.items()}
    for path, m in moments.items():
        if not 0 <= m.count < math.inf:
            yield f"the count of layer {path!r} is {m.count}"
    if (layer := _not_finite({path: m.mean for path, m in moments.items()})) is not None:
        yield f"the mean of layer {layer!r} is not finite"
    variances = {path: m.var for path, m in moments.items() if m.var.numel()}
    if (layer := _not_finite(variances)) is not None:
        yield f"the variance of layer {layer!r} is not finite"
    for path, var in variances.items():
        if float(var.min()) < 0:
            yield f"the variance of layer {path!r} is negative"
    buffers = {n: t for n, t in reply.buffers.items() if t.is_floating_point() and t.numel()}
    if (name := _not_finite({**reply.update, **reply.momentum, **buffers})) is not None:
        yield f"the update of {name!r} is not finite"


def inspect(replies: Sequence[Reply]) -> tuple[list[Reply], tuple[Rejected, ...]]:
    """Sort replies into usable ones, in the order of their clients, and rejected ones."""
    ordered = sorted(replies, key=lambda reply: reply.client)
    reasons = [fault(reply) for reply in ordered]
    good = [r for r, reason in zip(ordered, reasons, strict=True) if reason is None]
    bad = [Rejected(r.client, why) for r, why in zip(ordered, reasons, strict=True) if why]
    return good, tuple(bad)
