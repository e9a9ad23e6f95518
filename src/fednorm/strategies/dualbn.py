"""dualbn: FBN with the backward pass of BatchNorm, at one exchange a round.

A method of this library. It joins FBN (Guerraoui et al., 2024, arXiv:2405.14670), whose forward
pass is consistent over clients, with what FedTAN (Wang et al., 2023, arXiv:2301.02982) obtains by
layer-wise exchanges: a gradient that knows that the statistics follow the weights.

Client: normalises with the shared running statistics r, v of the round before, as in FBN. In the
backward pass it subtracts the shared means p ≈ E[δ] and q ≈ E[δ·x̂], δ being the loss gradient at
the layer's output scaled to one sample: du = γ/√(v+ε)·(dy - p/b - x̂·q/b) for a batch of b samples.
It reports the moments of its input and its own means. Convolutions use weights standardised per
output channel, (w-mean)/√(var·fan_in+1e-6), without bias, so that statistics one round old stay
valid.

Server: pools both and lets the shared ones follow.

With r, v, p, q of the same round the gradient is exactly that of one machine with BatchNorm. The
learning rate is warmed up over the first 50 rounds unless the algorithm says otherwise. With many
local steps the weights leave the statistics behind, and plain FedAvg is ahead at rates that suit
BatchNorm (`docs/local-epochs.md`); `alignbn` is for that.
`docs/own-methods.md` has the derivation and the measurements.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.strategy import Conversion, MergeInput, ema_update, find_rate
from fednorm.nn import rules
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.nn.dual_norm import BackwardMeans, add_backward_means, normalize_dual
from fednorm.registry import param
from fednorm.strategies.base import (
    FIXED_STATISTICS_REMEDY,
    BatchNormStrategy,
    require_batch_norm,
    standardize_weights,
)


@dataclass(frozen=True)
class DualBN(BatchNormStrategy):
    """Shared running statistics, forward and backward; convolution weights standardised."""

    statistics = "pool"
    needs_batch_statistics: ClassVar[bool] = False
    remedy: ClassVar[str] = FIXED_STATISTICS_REMEDY
    warmup: ClassVar[int] = 50

    stats_momentum: float = param(0.1, "with which the forward statistics follow, in (0, 1]")
    backward_momentum: float = param(0.1, "with which the backward means follow, in (0, 1]")
    backward_moments: bool = param(
        default=True, help="share the backward means; without them the backward pass is FBN's"
    )
    weight_standardization: bool = param(
        default=True, help="standardise the weights of convolutions"
    )

    def __post_init__(self) -> None:
        for name in ("stats_momentum", "backward_momentum"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)}.")

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose layers share forward and backward statistics."""
        converted = require_batch_norm(self._norms(model), self, model)
        return standardize_weights(converted) if self.weight_standardization else converted

    def _norms(self, model: nn.Module) -> Conversion:
        if not self.backward_moments:
            return to_fed_batch_norm(model, momentum=self.stats_momentum, tracking=True)
        return add_backward_means(
            model, momentum=self.stats_momentum, backward_momentum=self.backward_momentum
        )

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the shared statistics, forward and backward."""
        return normalize_dual if self.backward_moments else rules.shared_stats

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Let the shared statistics follow the pooled ones."""
        if not isinstance(merge.layer, BackwardMeans):
            return ema_update(previous, merge)
        means = torch.stack([r.moments.mean for r in merge.reports])
        weights = torch.tensor([r.moments.mass for r in merge.reports], dtype=torch.float64)
        rate = find_rate(previous, merge.num_batches, self.backward_momentum)
        pooled = merge.aggregator(means, weights)
        return RunningStats(
            torch.lerp(previous.mean, pooled, rate), previous.var, merge.num_batches
        )
