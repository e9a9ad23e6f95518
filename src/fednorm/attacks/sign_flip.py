"""Sign-flipping (SF).

Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic Gradient
Descent", ICLR 2021, arXiv:2012.14368.

Client: sends the opposite of its own update. Of statistics it sends the opposite of its own running
mean and its true variance, as in Guerraoui et al., 2024, arXiv:2405.14670, section 5. Where clients
send moments (`fbn`), it is the mean that makes the running mean its opposite.
"""

from dataclasses import dataclass

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext


@dataclass(frozen=True)
class SignFlip(Attack):
    """The opposite of the client's own values."""

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the opposite."""
        del context
        return -own

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the true variance."""
        del context
        return own
