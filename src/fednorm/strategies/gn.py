"""GroupNorm instead of BatchNorm.

Wu and He, "Group Normalization", ECCV 2018, arXiv:1803.08494; proposed for federated learning by
Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", 2020, arXiv:1910.00189.

Client: normalises each group of channels of each sample by its own moments, so no sample depends
on another.

Server: averages everything; there are no statistics. γ and β of the replaced layers are kept.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.strategy import Conversion, Strategy
from fednorm.nn.convert import to_sample_norm
from fednorm.registry import param
from fednorm.strategies.base import require_batch_norm


@dataclass(frozen=True)
class GN(Strategy):
    """GroupNorm instead of BatchNorm."""

    groups: int = param(2, "groups of channels; must divide the channels of every layer")
    round_down: bool = param(
        default=False, help="where `groups` does not divide them, take the next smaller that does"
    )

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"groups must be at least 1, not {self.groups}.")

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with GroupNorm layers."""
        return require_batch_norm(
            to_sample_norm(model, self.groups, round_down=self.round_down), self, model
        )
