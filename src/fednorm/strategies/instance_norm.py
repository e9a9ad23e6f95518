"""InstanceNorm instead of BatchNorm.

Ulyanov, Vedaldi and Lempitsky, "Instance Normalization: The Missing Ingredient for Fast
Stylization", 2016, arXiv:1607.08022.

Client: normalises each channel of each sample by its own moments, with γ and β as in the replaced
layer. It needs more than one value per channel: on flat features it refuses.

Server: averages everything; there are no statistics.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.strategy import Conversion, Strategy
from fednorm.nn.convert import to_sample_norm
from fednorm.strategies.base import require_batch_norm


@dataclass(frozen=True)
class IN(Strategy):
    """InstanceNorm (one group per channel) instead of BatchNorm."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with one group per channel."""
        return require_batch_norm(to_sample_norm(model, None), self, model)
