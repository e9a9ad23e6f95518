"""Sign-flipping (SF).

Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic Gradient
Descent", ICLR 2021, arXiv:2012.14368.

Client: sends its own update, negated. For statistics it sends its own running mean, negated, and
its true variance, as in Guerraoui et al., 2024, arXiv:2405.14670, section 5. Where clients
send moments (`fbn`), it sends the mean that negates the running mean.
"""

from dataclasses import dataclass

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext


@dataclass(frozen=True)
class SignFlip(Attack):
    """The client's own values, negated."""

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Negate the client's tensor."""
        del context
        return -own

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the true variance."""
        del context
        return own
