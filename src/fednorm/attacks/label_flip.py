"""Label flipping.

Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic Gradient
Descent", ICLR 2021, arXiv:2012.14368.

Client: trains on the label classes-1-y instead of y, and follows the protocol otherwise. A pixel
without a label stays without one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.attacks.base import DataAttack, DataInfo


@dataclass(frozen=True)
class LabelFlip(DataAttack):
    """Every label y becomes classes-1-y."""

    def poison(
        self, x: Tensor, y: Tensor, info: DataInfo, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the batch with flipped labels."""
        del rng
        return x, torch.where(y < 0, y, info.classes - 1 - y)
