"""How a BatchNorm layer treats a training batch: one function for each way.

| rule | normalises with | running statistics | reports |
|---|---|---|---|
| `batch` | the batch's own | follow as in torch | the client's running statistics |
| `recorded` | the batch's own | stay fixed | the moments of its input |
| `running` | the shared running ones | stay fixed | the moments of its input |
| `frozen` | the shared running ones | stay fixed | nothing |
| `untracked` | the batch's own | stay fixed | nothing |
| `surveyed` | the batch's own | stay fixed | the moments of all it sees in a survey |
| `averaged` | the batch's own | stay fixed | the mean over batches of their statistics |
| `watched` | the shared running ones | stay fixed | the moments of all it sees in a survey |

The rule of `sync_norm.py` synchronises over clients. Where the batches of several clients stand in
one, "the batch's own" means each client's own part of it: `normalize_per_client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fednorm.core.aggregation import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from fednorm.nn.batch_norm import FedBatchNorm


def batch_stats(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; the running ones follow as in torch."""
    momentum = layer.count_batch()
    if layer.recorder.context.client_sizes:
        return normalize_per_client(layer, x, momentum)
    return functional.batch_norm(
        x,
        layer.running_mean,
        layer.running_var,
        layer.weight,
        layer.bias,
        training=True,
        momentum=momentum,
        eps=layer.eps,
    )


def batch_stats_recorded(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record its moments."""
    layer.record_batch(x)
    return batch_stats_untracked(layer, x)


def batch_stats_untracked(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record nothing."""
    if layer.recorder.context.client_sizes:
        return normalize_per_client(layer, x, None)
    return functional.batch_norm(
        x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
    )


def calibrate_batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; add it to the survey."""
    layer.accumulate(x)
    return batch_stats_untracked(layer, x)


def calibrate_averaged(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; average them with those of the pass so far."""
    layer.average_batch(x)
    return batch_stats_untracked(layer, x)


def calibrate_shared(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the shared statistics; add the batch to the survey."""
    layer.accumulate(x)
    return frozen_stats(layer, x)


def shared_stats(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the shared statistics, constants for the gradient; record the moments."""
    layer.record_batch(x)
    return frozen_stats(layer, x)


def frozen_stats(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the shared statistics, as in evaluation; record nothing."""
    return functional.batch_norm(
        x,
        layer.running_mean,
        layer.running_var,
        layer.weight,
        layer.bias,
        training=False,
        eps=layer.eps,
    )


SILENT = (frozen_stats, batch_stats_untracked)  # after these a layer has nothing to report


def normalize_per_client(layer: FedBatchNorm, x: Tensor, momentum: float | None) -> Tensor:
    """Normalise each client's part by itself.

    With a momentum, the running statistics become the mean of those that the clients would have,
    weighted by the sizes of their parts; with None they stay fixed.
    """
    sizes = layer.recorder.context.client_sizes
    mean, var = layer.running_mean, layer.running_var
    if momentum is None or mean is None or var is None:
        return _normalize_parts(layer, x, None, None, 0.0)
    # One row for each client.
    means, variances = (_repeat_rows(values, len(sizes)) for values in (mean, var))
    y = _normalize_parts(layer, x, means, variances, momentum)
    if len(set(sizes)) == 1:
        torch.mean(means, 0, out=mean)
        torch.mean(variances, 0, out=var)
        return y
    weights = torch.tensor(sizes, dtype=torch.float64)
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 is too coarse for statistics
        mean.copy_(weighted_mean(means, weights))
        var.copy_(weighted_mean(variances, weights))
    return y


def _normalize_parts(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Normalise the parts; torch updates the clients' rows of `means` and `variances`."""
    sizes = layer.recorder.context.client_sizes
    if len(set(sizes)) == 1:
        return _normalize_as_channels(layer, x, means, variances, momentum)
    parts = [
        functional.batch_norm(
            part,
            _row_of(means, i),
            _row_of(variances, i),
            layer.weight,
            layer.bias,
            training=True,
            momentum=momentum,
            eps=layer.eps,
        )
        for i, part in enumerate(torch.split(x, list(sizes)))
    ]
    return torch.cat(parts)


def _repeat_rows(values: Tensor, count: int) -> Tensor:
    """Return a row of the values for each client; a quarter of the time that `repeat` takes."""
    return values.expand(count, -1).clone(memory_format=torch.contiguous_format)


def _row_of(rows: Tensor | None, i: int) -> Tensor | None:
    return None if rows is None else rows[i]


def _normalize_as_channels(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Treat clients with parts of one size, which are interleaved, as further channels.

    A model may have folded more into the batch, such as the positions of a sequence: then several
    rows in succession are one sample's.
    """
    sizes = layer.recorder.context.client_sizes
    count, folded = len(sizes), len(x) // sum(sizes)
    by_client = x
    if folded != 1:
        by_client = x.reshape(-1, count, folded, *x.shape[1:]).transpose(1, 2)
    y = functional.batch_norm(
        by_client.reshape(-1, count * x.shape[1], *x.shape[2:]),
        None if means is None else means.view(-1),
        None if variances is None else variances.view(-1),
        None if layer.weight is None else _repeat_rows(layer.weight, count).view(-1),
        None if layer.bias is None else _repeat_rows(layer.bias, count).view(-1),
        training=True,
        momentum=momentum,
        eps=layer.eps,
    )
    y = y.view(by_client.shape)
    return y if folded == 1 else y.transpose(1, 2).reshape(x.shape)


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """Shape one value per channel so that it broadcasts against a batch."""
    return value.view(1, -1, *[1] * (x.dim() - 2))
