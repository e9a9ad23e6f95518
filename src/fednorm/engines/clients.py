"""Where an engine gets clients and their batches from, and how one of them is trained."""

from collections.abc import Collection
from typing import Protocol

from fednorm.core.exchange import Exchange
from fednorm.core.messages import Batches, Broadcast, Memory, Reply
from fednorm.core.round import NonFiniteLossError, client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId


class Clients(Protocol):
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

    def everything(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        ...


def train_client(
    task: Task,
    received: Broadcast,
    memory: Memory,
    batches: Batches,
    exchange: Exchange,
    byzantine: Collection[ClientId] = (),
) -> tuple[Reply, Memory]:
    """Train one client for one round.

    An honest client that diverges ends the run, which is what a user wants to see. One that is
    Byzantine does so through a fault of its own: its reply says so, and the server rejects it.
    """
    try:
        return client_round(task, received, memory, batches, exchange)
    except NonFiniteLossError as error:
        if batches.client not in byzantine:
            raise
        loss = {"loss": error.loss}
        return Reply(batches.client, batches.examples, {}, {}, {}, metrics=loss), memory
