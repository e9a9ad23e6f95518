"""What an attack is: how a Byzantine client changes what it sends, or what it learns from."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttackContext:
    """What a Byzantine client knows when it lies about one tensor."""

    honest: Tensor  # `[clients, *shape]`: what the honest clients of the round send
    byzantine: int  # how many of the round's clients lie
    rng: torch.Generator

    @property
    def clients(self) -> int:
        """How many clients answer, the lying ones included."""
        return len(self.honest) + self.byzantine


class Attack:
    """A frozen dataclass; its fields are its settings.

    `corrupt` makes the tensors of an update, and the means of statistics. A variance must stay one,
    or the server would know the liar at once: it is the lie about it, cut off at 0. Statistics are
    running statistics, as FBN's Algorithm 2 sends them; where clients send moments, `following.py`
    translates the lie.
    """

    omniscient: ClassVar[bool] = False  # whether it looks at what honest clients send
    on_data: ClassVar[bool] = False  # whether it changes the client's data and nothing else

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return what is sent in the place of the client's own tensor."""
        raise NotImplementedError

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return what is sent in the place of the client's own variance."""
        return self.corrupt(own, context).clamp_min(0)


class DataAttack(Attack):
    """An attack that trains honestly on falsified data."""

    on_data: ClassVar[bool] = True

    def poison(
        self, x: Tensor, y: Tensor, info: "DataInfo", rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return what the client learns from in the place of a batch."""
        raise NotImplementedError

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the client's own tensor: what it sends is what its data made of it."""
        del context
        return own

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the client's own variance."""
        del context
        return own


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What an attack on data knows of them."""

    classes: int
    white: Tensor  # the brightest image, as a model sees it
