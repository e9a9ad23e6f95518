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

Another, `exchanged`, synchronises over clients; it has a file of its own. Where the batches of
several clients stand in one, "the batch's own" means each client's own part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from fednorm.nn.grouped import grouped

if TYPE_CHECKING:
    from torch import Tensor

    from fednorm.nn.batch_norm import FedBatchNorm


def batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; the running ones follow as in torch."""
    momentum = layer.advance()
    if layer.round.session.sizes:
        return grouped(layer, x, momentum)
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


def recorded(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record its moments."""
    layer.record(x)
    return untracked(layer, x)


def untracked(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record nothing."""
    if layer.round.session.sizes:
        return grouped(layer, x, None)
    return functional.batch_norm(
        x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
    )


def surveyed(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; add it to the survey."""
    layer.watch(x)
    return untracked(layer, x)


def averaged(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; average them with those of the pass so far."""
    layer.average(x)
    return untracked(layer, x)


def watched(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the shared statistics; add the batch to the survey."""
    layer.watch(x)
    return frozen(layer, x)


def running(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the shared statistics, constants for the gradient; record the moments."""
    layer.record(x)
    return frozen(layer, x)


def frozen(layer: FedBatchNorm, x: Tensor) -> Tensor:
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


SILENT = (frozen, untracked)  # after these a layer has nothing to report
