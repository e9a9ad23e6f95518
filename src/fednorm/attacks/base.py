"""The interface of attacks: change the messages of a Byzantine client, or its training data."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttackContext:
    """What a Byzantine client knows when it corrupts one tensor."""

    honest: Tensor  # `[clients, *shape]`: the tensors of the round's honest clients
    byzantine: int  # how many of the round's clients are Byzantine
    rng: torch.Generator

    @property
    def clients(self) -> int:
        """How many clients answer, Byzantine ones included."""
        return len(self.honest) + self.byzantine


class Attack(ABC):
    """A frozen dataclass; its fields are its settings.

    `corrupt` makes the tensors of an update and the means of statistics. A variance is clamped at
    0, as the server rejects a negative one. Statistics are running statistics, as FBN's Algorithm 2
    sends them; where clients send moments, `adversary.py` translates them.
    """

    omniscient: ClassVar[bool] = False  # whether it sees what honest clients send
    on_data: ClassVar[bool] = False  # whether it changes only the client's data

    @abstractmethod
    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the tensor to send instead of the client's `own`."""

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the variance to send instead of the client's `own`."""
        return self.corrupt(own, context).clamp_min(0)


class DataAttack(Attack):
    """An attack that trains by the protocol, on poisoned data."""

    on_data: ClassVar[bool] = True

    @abstractmethod
    def poison(
        self, x: Tensor, y: Tensor, info: "DataInfo", rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the batch to train on instead of `x` and `y`."""

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the client's own tensor: only its data are poisoned."""
        del context
        return own

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the client's own variance."""
        del context
        return own


@dataclass(frozen=True, slots=True)
class DataInfo:
    """What an attack on data knows about the data set."""

    classes: int
    white: Tensor  # the brightest image, as a model sees it
