"""The rule of HBN: shared and batch statistics mixed per channel by a learnable weight."""

import torch
from torch import Tensor, nn

from fednorm.core.layer import NormRule
from fednorm.core.moments import Moments, exact_values
from fednorm.core.strategy import Conversion
from fednorm.nn.batch_norm import FedBatchNorm, per_channel
from fednorm.nn.convert import add_to_norms, to_fed_batch_norm


class Mixing(nn.Module):
    """The mixing weight of each channel, a = sigmoid(α): 0 is all shared, 1 is all batch."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros_like(like))

    def forward(self) -> Tensor:
        """Return a."""
        return torch.sigmoid(self.alpha)


def add_mixing(model: nn.Module) -> Conversion:
    """Convert BatchNorm layers and give each a mixing weight."""
    return add_to_norms(to_fed_batch_norm(model, tracking=True), "mixing", Mixing)


def _mixing_share(layer: FedBatchNorm) -> Tensor:
    if not isinstance(layer.mixing, Mixing):
        raise TypeError(f"layer {layer.recorder.site!r} has no mixing weight; convert the model.")
    share: Tensor = layer.mixing()
    return share


def _use_mixed(layer: FedBatchNorm, x: Tensor) -> Tensor:
    return _normalize(layer, x, *_mix(layer, x))


def _accumulate_and_use_mixed(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.accumulate(x)
    return _use_mixed(layer, x)


def _accumulate_mixed(layer: FedBatchNorm, x: Tensor) -> Tensor:
    mean, var = _mix(layer, x)
    mixed = Moments(x.numel() / x.shape[1], mean.detach(), var.detach())
    layer.recorder.accumulate(mixed, rows=len(x))
    return _normalize(layer, x, mean, var)


def _mix(layer: FedBatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance with which a batch is normalised."""
    share = _mixing_share(layer)
    shared_mean, shared_var, _ = layer.running_buffers()
    var, mean = torch.var_mean(exact_values(x), [0, *range(2, x.dim())], correction=0)
    return torch.lerp(shared_mean, mean, share), torch.lerp(shared_var, var, share)


def _normalize(layer: FedBatchNorm, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y = (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + layer.eps), x)
    if layer.weight is None:
        return y
    y = y * per_channel(layer.weight, x)
    return y if layer.bias is None else y + per_channel(layer.bias, x)


# Gradients flow through the batch's part and a.
normalize_hybrid = NormRule("mixed", tracks=False, reports="nothing", normalize=_use_mixed)
normalize_hybrid_measured = NormRule(
    "mixed", tracks=False, reports="totals", normalize=_accumulate_and_use_mixed
)
# Reports the mixed statistics, not those of the inputs.
normalize_hybrid_calibrated = NormRule(
    "mixed", tracks=False, reports="totals", normalize=_accumulate_mixed
)
