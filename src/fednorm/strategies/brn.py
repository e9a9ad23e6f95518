"""Batch renormalization: BatchNorm whose batches are corrected to the running statistics.

Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models",
2017, arXiv:1702.03275, applied on every client.

Client: normalises with its batch's own mean and standard deviation, then scales by r and shifts by
d, which carry the result over to the running statistics as far as the bounds `r_max` and `d_max`
allow. r and d are constants for the gradient. With bounds 1 and 0 it is BatchNorm; with bounds that
are never reached, the forward pass is that of normalisation by the running statistics, while the
gradient still flows through the batch's own.

Server: averages weights, γ, β and the running statistics. With `statistics="pool"` clients correct
to the shared statistics, which stay fixed within a round, and the server pools their moments.

Deviations: the running statistic is torch's (unbiased) variance, of which the root is taken, not
the average of standard deviations; and the bounds are the same from the first step, where the paper
begins with 1 and 0 and relaxes them to 3 and 5.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.messages import Broadcast
from fednorm.core.moments import Moments
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.registry import param
from fednorm.strategies.base import SharedStatisticsStrategy


@dataclass(frozen=True)
class BRN(SharedStatisticsStrategy):
    """Batch statistics, corrected towards the running ones within bounds."""

    r_max: float = param(3.0, "bound of the scale correction, at least 1; 1 corrects no scale")
    d_max: float = param(5.0, "bound of the shift correction, at least 0; 0 corrects no shift")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.r_max >= 1:
            raise ValueError(f"r_max must be at least 1, not {self.r_max}.")
        if not self.d_max >= 0:
            raise ValueError(f"d_max must be at least 0, not {self.d_max}.")

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics, corrected to the running ones."""
        return make_renorm_rule(self.r_max, self.d_max, self.statistics)


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
    if follows:
        return layer.normalize_corrected(x, r, d, layer.count_batch())
    layer.record_batch(x)
    return layer.normalize_corrected(x, r, d)


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
