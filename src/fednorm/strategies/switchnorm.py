"""Switchable normalization: every layer learns its mixture of instance, layer and batch norm.

Luo, Ren, Peng, Zhang and Li, "Differentiable Learning-to-Normalize via Switchable Normalization",
2019, arXiv:1806.10779, applied on every client.

Client: normalises with a softmax-weighted mixture of the means of the instance, the sample and the
batch, and with another mixture of their variances. The mixing weights learn along with γ and β. In
evaluation the running statistics replace the batch's.

Server: averages weights, γ, β, the mixing weights and the running statistics;
`statistics="pool"` pools the clients' moments instead.

Deviations: the batch's part of evaluation uses a moving average, as BatchNorm does, where the paper
averages over a number of batches after training, and its running variance is unbiased, as torch
keeps it; all other variances are biased, as in the paper's formula. Parts that look at a single
value, as the instance part of 2-D inputs, are left out of the mixture.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast
from fednorm.core.strategy import Conversion
from fednorm.nn.switch_norm import (
    normalize_switched,
    normalize_switched_calibrated,
    normalize_switched_recorded,
    to_switch_norm,
)
from fednorm.strategies.base import (
    SharedStatisticsStrategy,
    require_batch_norm,
    standardize_weights,
)


@dataclass(frozen=True)
class SwitchNorm(SharedStatisticsStrategy):
    """Layers that learn their mixture of instance, layer and batch normalization."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with mixing layers instead of BatchNorm."""
        mixing = require_batch_norm(
            to_switch_norm(model, momentum=self.stats_momentum), self, model
        )
        return standardize_weights(mixing) if self.weight_standardization else mixing

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Mix in the batch's own statistics."""
        return normalize_switched if self.statistics == "average" else normalize_switched_recorded

    def adaptation_rule(self) -> NormRule:
        """Mix in the batch's own statistics."""
        return normalize_switched_calibrated
