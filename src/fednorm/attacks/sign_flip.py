"""Sign-flipping (SF).

Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic Gradient
Descent", ICLR 2021, arXiv:2012.14368.

Client: sends the opposite of its own update. Of statistics it sends the opposite of its own running
mean and its true variance, as in Guerraoui et al., 2024, arXiv:2405.14670, section 5. Where clients
send moments (`fbn`), it is the mean that makes the running mean its opposite.
"""

from dataclasses import dataclass

from torch import Tensor

from fednorm.attacks.base import Attack, View


@dataclass(frozen=True)
class SignFlip(Attack):
    """The opposite of the client's own values."""

    def lie(self, own: Tensor, view: View) -> Tensor:
        """Return the opposite."""
        del view
        return -own

    def variance(self, own: Tensor, view: View) -> Tensor:
        """Return the true variance."""
        del view
        return own
