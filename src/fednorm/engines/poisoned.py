"""Clients of whom some learn from falsified data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from fednorm.attacks import Adversary, DataAttack, DataInfo
from fednorm.core.messages import Batches
from fednorm.core.types import ClientId
from fednorm.engines.clients import Clients


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The same clients, the Byzantine ones with other data."""

    clients: Clients
    adversary: Adversary
    world: DataInfo

    def all(self) -> list[ClientId]:
        """Return every client."""
        return self.clients.all()

    def participants(self, round_: int) -> list[ClientId]:
        """Return who takes part in a round."""
        return self.clients.participants(round_)

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return a client's batches of a round."""
        return self._falsified(self.clients.batches(client, round_), round_)

    def everything(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        return self._falsified(self.clients.everything(client), 0)

    def _falsified(self, own: Batches, round_: int) -> Batches:
        if own.client not in self.adversary.clients:
            return own
        steps, everything = (
            _Steps(data, own.client, number, self)
            for data, number in ((own.steps, round_), (own.all_steps, 0))
        )
        return replace(own, steps=steps, everything=everything)


@dataclass(frozen=True, slots=True)
class _Steps:
    steps: Iterable[tuple[Tensor, Tensor]]
    client: ClientId
    round_: int
    source: Poisoned

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        adversary = self.source.adversary
        attack, rng = adversary.attack, adversary.make_generator(self.client, self.round_)
        assert isinstance(attack, DataAttack), "other attacks leave the data alone"  # noqa: S101
        for x, y in self.steps:
            yield attack.poison(x, y, self.source.world, rng)
