"""BatchNorm where the batches of several clients stand in one: each part by its own statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from fednorm.core.aggregator import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from fednorm.nn.batch_norm import FedBatchNorm


def grouped(layer: FedBatchNorm, x: Tensor, momentum: float | None) -> Tensor:
    """Normalise each client's part by itself.

    With a momentum, the running statistics become the mean of those that the clients would have,
    weighted by the sizes of their parts; with None they stay fixed.
    """
    sizes = layer.round.session.sizes
    mean, var = layer.running_mean, layer.running_var
    if momentum is None or mean is None or var is None:
        return _normalise(layer, x, None, None, 0.0)
    means, variances = _rows(mean, len(sizes)), _rows(var, len(sizes))  # one for each client
    y = _normalise(layer, x, means, variances, momentum)
    if len(set(sizes)) == 1:
        torch.mean(means, 0, out=mean)
        torch.mean(variances, 0, out=var)
        return y
    weights = torch.tensor(sizes, dtype=torch.float64)
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 is too coarse for statistics
        mean.copy_(weighted_mean(means, weights))
        var.copy_(weighted_mean(variances, weights))
    return y


def _normalise(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Normalise the parts; torch updates the clients' rows of `means` and `variances`."""
    sizes = layer.round.session.sizes
    if len(set(sizes)) == 1:
        return _as_channels(layer, x, means, variances, momentum)
    parts = [
        functional.batch_norm(
            part,
            _row(means, i),
            _row(variances, i),
            layer.weight,
            layer.bias,
            training=True,
            momentum=momentum,
            eps=layer.eps,
        )
        for i, part in enumerate(torch.split(x, list(sizes)))
    ]
    return torch.cat(parts)


def _rows(values: Tensor, count: int) -> Tensor:
    """Return a row of the values for each client; a quarter of the time that `repeat` takes."""
    return values.expand(count, -1).clone(memory_format=torch.contiguous_format)


def _row(rows: Tensor | None, i: int) -> Tensor | None:
    return None if rows is None else rows[i]


def _as_channels(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Treat clients with parts of one size, which are interleaved, as further channels.

    A model may have folded more into the batch, such as the positions of a sequence: then several
    rows in succession are one sample's.
    """
    sizes = layer.round.session.sizes
    count, folded = len(sizes), len(x) // sum(sizes)
    by_client = x
    if folded != 1:
        by_client = x.reshape(-1, count, folded, *x.shape[1:]).transpose(1, 2)
    y = functional.batch_norm(
        by_client.reshape(-1, count * x.shape[1], *x.shape[2:]),
        None if means is None else means.view(-1),
        None if variances is None else variances.view(-1),
        None if layer.weight is None else _rows(layer.weight, count).view(-1),
        None if layer.bias is None else _rows(layer.bias, count).view(-1),
        training=True,
        momentum=momentum,
        eps=layer.eps,
    )
    y = y.view(by_client.shape)
    return y if folded == 1 else y.transpose(1, 2).reshape(x.shape)
