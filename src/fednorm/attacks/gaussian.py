"""Gaussian noise.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NeurIPS 2017, arXiv:1703.02757, section 5.

Client: sends normal noise around 0 instead of its update and its running means. A running variance
becomes the magnitude of such noise; where clients send moments (`fbn`), at least (1-β) times the
shared one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class Gaussian(Attack):
    """Normal noise, independent of the data."""

    std: float = param(1.0, "standard deviation of the noise, above 0")

    def __post_init__(self) -> None:
        if not 0 < self.std < float("inf"):
            raise ValueError(f"gaussian needs a std above 0, not {self.std}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return noise."""
        # Drawn on the CPU in one number format: the same noise on every device.
        noise = torch.randn(own.shape, generator=context.rng, dtype=torch.float64)
        return (self.std * noise).to(own)

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the magnitude of noise."""
        return self.corrupt(own, context).abs()
