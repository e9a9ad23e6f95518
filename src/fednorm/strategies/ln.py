"""LayerNorm instead of BatchNorm.

Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

Client: normalises each sample by the moments of all its channels together: GroupNorm with one
group, γ and β per channel as in the replaced layer.

Server: averages everything; there are no statistics.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.strategy import Conversion, Strategy
from fednorm.nn.convert import to_sample_norm
from fednorm.strategies.base import require_batch_norm


@dataclass(frozen=True)
class LN(Strategy):
    """LayerNorm (GroupNorm with one group) instead of BatchNorm."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with one group per layer."""
        return require_batch_norm(to_sample_norm(model, 1), self, model)
