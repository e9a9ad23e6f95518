"""Attacks of clients that know what the honest clients of a round send."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class FallOfEmpires(Attack):
    """Minus ε times the mean of what honest clients send.

    Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product
    Manipulation", UAI 2019, arXiv:1903.03936.

    Client: knows what the honest clients send, and sends -ε times their mean; of statistics, of
    their running means. A variance becomes 0, the valid variance nearest to that. Where clients
    send moments (`fbn`), 0 is the batch's variance: the running variance is then (1-β) times the
    shared one, not 0.
    """

    omniscient: ClassVar[bool] = True

    epsilon: float = param(2.0, "ε: how far to go against the honest clients, above 0")

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < float("inf"):
            raise ValueError(f"foe needs an epsilon above 0, not {self.epsilon}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return -ε times the honest mean."""
        del own
        return -self.epsilon * context.honest.mean(0)


@dataclass(frozen=True)
class ALittleIsEnough(Attack):
    """The honest mean minus z honest standard deviations.

    Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed
    Learning", NeurIPS 2019, arXiv:1902.06156.

    Client: knows what the honest clients send, and sends their mean minus z of their standard
    deviations, coordinate by coordinate. z is as large as it can be without standing out: f of n
    clients are Byzantine, s = ⌊n/2+1⌋-f honest ones are needed for a majority, and z =
    Φ⁻¹((n-f-s)/(n-f)). A variance is treated in the same way, and clamped at 0. The attack is the
    same on moments and on running statistics.

    The standard deviation divides by the number of honest clients; that of a single one is 0.
    """

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


@dataclass(frozen=True)
class Mimic(Attack):
    """A copy of what one honest client sends.

    Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
    ICLR 2022, arXiv:2006.09365.

    Client: copies the update and the statistics, moments as well as running ones, of one honest
    client. No copy is unusual; where clients differ, that client's data get more weight than they
    should.

    Deviation: the paper looks for the client that is worst to copy; here its position among the
    honest clients of a round is a setting.
    """

    omniscient: ClassVar[bool] = True

    victim: int = param(0, "which of the honest clients of a round is copied, counted from 0")

    def __post_init__(self) -> None:
        if self.victim < 0:
            raise ValueError(f"mimic needs a victim of 0 or more, not {self.victim}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the victim's tensor."""
        del own
        return context.honest[self.victim % len(context.honest)].clone()
