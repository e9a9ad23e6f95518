"""A Little Is Enough (ALIE).

Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning",
NeurIPS 2019, arXiv:1902.06156.

Client: knows what the honest clients send, and sends their mean minus z of their standard
deviations, coordinate by coordinate. z is as large as it can be without standing out: f of n
clients are Byzantine, s = ⌊n/2+1⌋-f honest ones are needed for a majority, and
z = Φ⁻¹((n-f-s)/(n-f)). A variance is treated in the same way, and clamped at 0. The attack is the
same on moments and on running statistics.

The standard deviation divides by the number of honest clients; that of a single one is 0.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class ALittleIsEnough(Attack):
    """The honest mean minus z honest standard deviations."""

    omniscient: ClassVar[bool] = True

    z: float | None = param(None, "how many standard deviations; 'none' finds z from n and f")

    def __post_init__(self) -> None:
        if self.z is not None and not abs(self.z) < float("inf"):
            raise ValueError(f"alie needs a finite z, not {self.z}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the honest mean minus z standard deviations."""
        del own
        z = choose_z(context.clients, context.byzantine) if self.z is None else self.z
        return context.honest.mean(0) - z * context.honest.std(0, correction=0)


def choose_z(clients: int, byzantine: int) -> float:
    """Return z for `clients` clients of which `byzantine` attack.

    If the attackers are a majority without any honest client, or too few for a share of the honest
    ones beyond z, the formula has no value; the nearest share that has one is used.

    >>> round(choose_z(10, 3), 3)
    0.18
    >>> round(choose_z(50, 24), 3)
    1.426
    """
    honest = clients - byzantine
    supporters = clients // 2 + 1 - byzantine
    share = (honest - supporters) / honest
    least = 1 / (2 * honest)
    return NormalDist().inv_cdf(min(max(share, least), 1 - least))
