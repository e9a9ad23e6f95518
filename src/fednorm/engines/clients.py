"""Where an engine gets clients and their batches from, and how they are trained in turn."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fednorm.core.exchange import Exchange, PendingError, Replay, Solo, answer_exchange
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply
from fednorm.core.round import NonFiniteLossError, client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId


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
