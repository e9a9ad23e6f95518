"""Where an engine gets clients and their batches from, and how they are trained in turn."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from fednorm.attacks import Adversary, DataAttack, DataInfo
from fednorm.core.exchange import Exchange, PendingError, Replay, Solo, answer_exchange
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply
from fednorm.core.random_streams import Stream
from fednorm.core.round import client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.client_state import LIMIT
from fednorm.errors import NonFiniteLossError


class ClientSource(Protocol):
    """Where an engine gets clients and their batches from."""

    def all(self) -> list[ClientId]:
        """Return every client."""
        ...

    def participants(self, round_: int) -> list[ClientId]:
        """Return who takes part in a round."""
        ...

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return a client's batches of a round."""
        ...

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        ...


def train_client(
    task: Task,
    received: Broadcast,
    client_state: ClientState,
    batches: Batches,
    exchange: Exchange,
    byzantine: Collection[ClientId] = (),
) -> tuple[Reply, ClientState]:
    """Train one client for one round.

    An honest client that diverges ends the run, which is what a user wants to see. One that is
    Byzantine does so through a fault of its own: its reply says so, and the server rejects it.
    """
    try:
        return client_round(task, received, client_state, batches, exchange)
    except NonFiniteLossError as error:
        if batches.client not in byzantine:
            raise
        loss = {"loss": error.loss}
        return Reply(batches.client, batches.examples, {}, {}, {}, metrics=loss), client_state


def train_clients(
    task: Task,
    received: Broadcast,
    client_states: Mapping[ClientId, ClientState],
    batches: Sequence[Batches],
    byzantine: Collection[ClientId] = (),
) -> tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]]:
    """Train all clients, again and again while they wait for answers of an exchange."""
    if len(batches) == 1:  # a client that is alone waits for nobody
        solo, (own,) = Solo(), batches
        client_state = client_states.get(own.client, ClientState())
        return [train_client(task, received, client_state, own, solo, byzantine)], solo.answers
    answers: dict[str, Tensor] = {}
    while True:
        results: list[tuple[Reply, ClientState]] = []
        waiting: dict[ClientId, PendingError] = {}
        for own in batches:
            client_state = client_states.get(own.client, ClientState())
            try:
                replay = Replay(answers)
                results.append(train_client(task, received, client_state, own, replay, byzantine))
            except PendingError as pending:
                waiting[own.client] = pending
        if not waiting:
            return results, answers
        pending_ones = [waiting[client] for client in sorted(waiting)]
        answers[pending_ones[0].site] = answer_exchange(pending_ones, task.statistics_aggregator)


ATTEMPTS = 5  # at one round, before a run gives up


@dataclass(frozen=True, slots=True)
class Faults:
    """Under which a run is simulated; the default is that all clients are honest and answer."""

    adversary: Adversary | None = None
    client_dropout: float = 0.0  # the probability with which a client vanishes in mid-round
    min_replies: int = 1  # good ones that a round needs
    seed: int = 0
    client_state_bytes: int = (
        LIMIT  # of what clients keep, that are held in memory; more goes to disk
    )

    @property
    def faultless(self) -> bool:
        """Whether nothing goes wrong but by itself."""
        return self.adversary is None and not self.client_dropout and self.min_replies <= 1

    @property
    def byzantine(self) -> frozenset[ClientId]:
        """Return who lies."""
        return self.adversary.clients if self.adversary else frozenset()

    def sample_clients(
        self, clients: ClientSource, round_: int, attempt: int, before: Collection[ClientId]
    ) -> list[ClientId]:
        """Return who takes part: in later attempts others, as far as there are others."""
        first = clients.participants(round_)
        if not attempt:
            return first
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.RETRY_CLIENTS])
        drawn = rng.permutation(clients.all()).tolist()
        fresh_first = sorted(drawn, key=lambda client: client in before)
        return sorted(fresh_first[: len(first)])

    def surviving(self, asked: Sequence[ClientId], round_: int, attempt: int) -> list[ClientId]:
        """Return who does not vanish."""
        if not self.client_dropout:
            return list(asked)
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.CLIENT_DROPOUT])
        stays = rng.random(len(asked)) >= self.client_dropout
        return [client for client, here in zip(asked, stays.tolist(), strict=True) if here]

    def can_retry(self, clients: ClientSource, attempt: int, tried: Collection[ClientId]) -> bool:
        """Return whether another attempt could end otherwise, and is not one too many."""
        others = any(client not in tried for client in clients.all())
        return attempt + 1 < ATTEMPTS and (others or self.client_dropout > 0)


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class PoisonedClients:
    """The same clients, the Byzantine ones with other data."""

    clients: ClientSource
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
        return self._poison(self.clients.batches(client, round_), round_)

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        return self._poison(self.clients.all_batches(client), 0)

    def _poison(self, own: Batches, round_: int) -> Batches:
        if own.client not in self.adversary.clients:
            return own
        steps, everything = (
            _PoisonedSteps(data, own.client, number, self)
            for data, number in ((own.steps, round_), (own.all_steps, 0))
        )
        return replace(own, steps=steps, all_data=everything)


@dataclass(frozen=True, slots=True)
class _PoisonedSteps:
    steps: Iterable[tuple[Tensor, Tensor]]
    client: ClientId
    round_: int
    source: PoisonedClients

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        adversary = self.source.adversary
        attack, rng = adversary.attack, adversary.make_generator(self.client, self.round_)
        assert isinstance(attack, DataAttack), "other attacks leave the data alone"  # noqa: S101
        for x, y in self.steps:
            yield attack.poison(x, y, self.source.world, rng)
