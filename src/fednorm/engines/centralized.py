"""The reference: one machine that holds everything.

It is a single client whose batches are the very batches that the clients of a federation would
draw, merged. Nothing else differs, so any difference to a federated run is the method's doing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from fednorm.core.messages import Batches
from fednorm.core.types import ClientId
from fednorm.engines.clients import ClientSource


@dataclass(frozen=True, slots=True)
class MergedClients:
    """All clients of a federation as one machine."""

    clients: ClientSource

    def all(self) -> list[ClientId]:
        """Return the only client."""
        return [0]

    def participants(self, round_: int) -> list[ClientId]:  # noqa: ARG002 (protocol)
        """Return the only client."""
        return [0]

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return the merged batches of the clients that would take part in the round."""
        return merge_batches(
            [self.clients.batches(c, round_) for c in self.clients.participants(round_)]
        )

    def all_batches(self, client: ClientId) -> Batches:  # noqa: ARG002 (protocol)
        """Return all data once."""
        return merge_batches([self.clients.all_batches(c) for c in self.clients.all()])


@dataclass(frozen=True, slots=True)
class MergedSteps:
    """Step s holds the samples of step s of every client that has one."""

    parts: Sequence[Iterable[tuple[Tensor, Tensor]]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batches in zip_longest(*self.parts):
            present = [batch for batch in batches if batch is not None]
            yield torch.cat([x for x, _ in present]), torch.cat([y for _, y in present])


def merge_batches(parts: Sequence[Batches]) -> Batches:
    """Return the batches of several clients as those of one."""
    return Batches(
        0,
        MergedSteps([part.steps for part in parts]),
        sum(part.examples for part in parts),
        seed=parts[0].seed,
        all_data=MergedSteps([part.all_steps for part in parts]),
    )
