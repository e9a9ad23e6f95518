"""FedFN: any strategy, plus L2-normalised features before the classifier.

Kim, Lee, Oh and Yun, "FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in
Federated Learning", 2023, arXiv:2311.13267.

Client: as the base strategy; the classifier, the last linear layer, sees the direction of a feature
vector and not its length.

Server: as the base strategy.

Deviation: the classifier keeps its bias, which the paper's formula does not have.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from fednorm.core.registry import param
from fednorm.core.strategy import Conversion
from fednorm.nn.feature_norm import normalize_features
from fednorm.strategies.base import Strategy


@dataclass(frozen=True)
class FedFN(Strategy):
    """Any strategy, with L2-normalised features before the classifier."""

    base: str = param("naive", "the strategy that it adds to")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "fields of the base strategy, as a table"}
    )

    def __post_init__(self) -> None:
        if self.base == "fedfn":
            raise ValueError("FedFN adds to another strategy, not to itself; choose another base.")
        self._base  # noqa: B018 (an unknown base is refused here)

    @cached_property
    def _base(self) -> Strategy:
        from fednorm.strategies import strategy  # noqa: PLC0415 (the registry holds this class)

        options = {k: None if v == "none" else v for k, v in self.options.items()}
        return strategy(self.base, **options)

    def convert(self, model: nn.Module) -> Conversion:
        """Convert as the base strategy does, then normalise the features."""
        return normalize_features(self._base.convert(model))

    # Everything else is the base strategy's.

    def __getattribute__(self, name: str) -> Any:
        """Look up what a strategy decides at the base strategy."""
        return getattr(self._base, name) if name in _DELEGATED else super().__getattribute__(name)


_DELEGATED = {name for name in vars(Strategy) if not name.startswith("_") and name != "convert"}
