"""Mimic.

Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
ICLR 2022, arXiv:2006.09365.

Client: copies the update and the statistics, moments as well as running ones, of one honest client.
No copy is unusual; where clients differ, that client's data get more weight than they should.

Deviation: the paper looks for the client that is worst to copy; here its position among the
honest clients of a round is a setting.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class Mimic(Attack):
    """A copy of what one honest client sends."""

    omniscient: ClassVar[bool] = True

    victim: int = param(0, "which of the honest clients of a round is copied, counted from 0")

    def __post_init__(self) -> None:
        if self.victim < 0:
            raise ValueError(f"mimic needs a victim of 0 or more, not {self.victim}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the victim's tensor."""
        del own
        return context.honest[self.victim % len(context.honest)].clone()
