"""NaN or infinity: broken hardware, or a malicious client.

Client: sends NaN or infinity instead of every value, variances included. A server that validates
its replies (Guerraoui, Gupta and Pinot, "Byzantine Machine Learning: A Primer", 2023,
doi:10.1145/3616537) rejects them, names the clients, and continues the round without them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class NonFinite(Attack):
    """NaN or infinity everywhere."""

    value: Literal["nan", "inf"] = param("nan", "'nan' or 'inf'")

    def __post_init__(self) -> None:
        if self.value not in ("nan", "inf"):
            raise ValueError(f"non_finite needs the value 'nan' or 'inf', not {self.value!r}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return NaN or infinity."""
        del context
        return torch.full_like(own, float(self.value))

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return NaN or infinity."""
        return self.corrupt(own, context)
