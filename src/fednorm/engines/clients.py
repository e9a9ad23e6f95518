"""Where an engine gets clients and their batches from."""

from typing import Protocol

from fednorm.core.messages import Batches
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
