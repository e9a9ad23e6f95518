"""Fall of Empires (FOE).

Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product
Manipulation", UAI 2019, arXiv:1903.03936.

Client: knows what the honest clients send, and sends -ε times their mean; of statistics, of their
running means. A variance becomes 0, the valid variance nearest to that. Where clients send moments
(`fbn`), 0 is the batch's variance: the running variance is then (1-β) times the shared one, not
0.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class FallOfEmpires(Attack):
    """Minus ε times the mean of what honest clients send."""

    omniscient: ClassVar[bool] = True

    epsilon: float = param(2.0, "ε: how far to go against the honest clients, above 0")

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < float("inf"):
            raise ValueError(f"foe needs an epsilon above 0, not {self.epsilon}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return -ε times the honest mean."""
        del own
        return -self.epsilon * context.honest.mean(0)
