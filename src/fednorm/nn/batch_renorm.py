"""The rule of batch renormalization: the batch's own statistics, corrected to the running ones.

With bounds that are never reached, the forward pass is that of normalisation by the running
statistics, while the gradient still flows through the batch's own.
"""

from functools import partial

from torch import Tensor
from torch.nn import functional

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.moments import Moments
from fednorm.nn.batch_norm import FedBatchNorm


def make_renorm_rule(r_max: float, d_max: float, statistics: Statistics) -> NormRule:
    """Return the rule with r in [1/r_max, r_max] and d in [-d_max, d_max].

    With "average" the running statistics follow as in torch; with "pool" they stay fixed and the
    moments are recorded.
    """
    follows = statistics == "average"
    normalize = partial(_renormalize, r_max=r_max, d_max=d_max, follows=follows)
    if follows:
        return NormRule("mixed", tracks=True, reports="running", normalize=normalize)
    return NormRule("mixed", tracks=False, reports="moments", normalize=normalize)


def _renormalize(
    layer: FedBatchNorm, x: Tensor, *, r_max: float, d_max: float, follows: bool
) -> Tensor:
    r, d = compute_corrections(layer, x, r_max, d_max)
    # γ(x̂·r + d) + β is BatchNorm with γ·r and β + γ·d: one call of torch's own kernel.
    weight, bias = (r, d) if layer.weight is None else (layer.weight * r, layer.weight * d)
    if layer.bias is not None:  # torch has layers with γ alone
        bias = bias + layer.bias
    if not follows:
        layer.record_batch(x)
        return functional.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
    return functional.batch_norm(
        x,
        layer.running_mean,
        layer.running_var,
        weight,
        bias,
        training=True,
        momentum=layer.count_batch(),
        eps=layer.eps,
    )


def compute_corrections(
    layer: FedBatchNorm, x: Tensor, r_max: float, d_max: float
) -> tuple[Tensor, Tensor]:
    """Return r and d of a batch, per channel: constants for the gradient.

    r is the batch's standard deviation over the running one, and d the distance of the batch's mean
    from the running one in running standard deviations, both clipped.
    """
    mean, var, _ = layer.running_buffers()
    batch = Moments.of(x.detach())
    scale = (var + layer.eps).sqrt()
    r = (batch.var + layer.eps).sqrt() / scale
    d = (batch.mean - mean) / scale
    return r.clamp(1 / r_max, r_max), d.clamp(-d_max, d_max)
