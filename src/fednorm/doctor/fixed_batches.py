"""Clients whose batches are drawn once, so that every measurement sees the same samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.core.messages import Batches
from fednorm.core.random_streams import Stream
from fednorm.core.types import ClientId
from fednorm.data.dataset import Dataset
from fednorm.data.federation import Federation
from fednorm.data.sampling import Plan

Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class FixedBatches:
    """Clients with the same batches in every round."""

    steps: Mapping[ClientId, Sequence[Batch]]

    def all(self) -> list[ClientId]:
        """Return every client."""
        return list(self.steps)

    def participants(self, round_: int) -> list[ClientId]:  # noqa: ARG002 (protocol)
        """Return every client."""
        return self.all()

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return a client's batches."""
        own = self.steps[client]
        return Batches(client, own, sum(len(y) for _, y in own))

    def all_batches(self, client: ClientId) -> Batches:
        """Return a client's batches."""
        return self.batches(client, 0)

    def split_steps(self) -> list["FixedBatches"]:
        """Return the clients with their first batch only, with their second only, and so on."""
        count = len(next(iter(self.steps.values())))
        return [
            FixedBatches({client: [own[step]] for client, own in self.steps.items()})
            for step in range(count)
        ]


def draw_random(data: Dataset, seed: int, clients: int = 2) -> FixedBatches:
    """Return clients with one batch of two random samples each, shaped as those of the data."""
    generator = torch.Generator().manual_seed(seed + Stream.DOCTOR_BATCHES)

    def batch() -> Batch:
        x = torch.randn(2, *data.shape, generator=generator)
        y = torch.randint(data.classes, (2, *data.y.shape[1:]), generator=generator)
        return x.to(data.transform.device, data.transform.dtype), y.to(data.transform.device)

    return FixedBatches({client: [batch()] for client in range(clients)})


def draw(federation: Federation, count: int) -> FixedBatches:
    """Return the clients of a federation with `count` batches each, as in its first round."""
    longer = replace(federation, plan=Plan(federation.plan.batch, steps=count))
    return FixedBatches({c: list(longer.batches(c, 1).steps) for c in federation.all()})


def deal_again(clients: FixedBatches, seed: int) -> FixedBatches:
    """Deal the same samples to the same clients at random; batches keep their sizes.

    The remaining differences between clients are due to small batches.
    """
    dealt = [batch for own in clients.steps.values() for batch in own]
    x, y = torch.cat([x for x, _ in dealt]), torch.cat([y for _, y in dealt])
    order = torch.randperm(
        len(y), generator=torch.Generator().manual_seed(seed + Stream.DOCTOR_BATCHES)
    ).to(y.device)
    batches = iter(torch.split(order, [len(y) for _, y in dealt]))
    return FixedBatches(
        {
            client: [(x[picked], y[picked]) for _, picked in zip(own, batches, strict=False)]
            for client, own in clients.steps.items()
        }
    )
