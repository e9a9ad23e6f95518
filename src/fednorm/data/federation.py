"""Data divided among clients: who takes part in a round, and with which batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fednorm.core.messages import Batches
from fednorm.core.types import ClientId
from fednorm.data.batches import Plan, participants
from fednorm.data.dataset import Dataset
from fednorm.data.partition import Indices, match_groups, match_test, parse, partition
from fednorm.data.partition.natural import Natural

TAG = 302


@dataclass(frozen=True, slots=True)
class Federation:
    """A data set divided among clients; every tensor is held once."""

    data: Dataset  # training samples as their clients see them
    x_test: Tensor  # test samples as the clients see them; `data.x_test` is as it was
    parts: list[Indices]
    test_parts: list[Indices]
    plan: Plan
    seed: int
    participation: float = 1.0
    unseen: int = 0  # the last so many clients never train

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.parts)

    def all(self) -> list[ClientId]:
        """Return every client that trains."""
        return list(range(self.clients - self.unseen))

    def participants(self, round_: int) -> list[ClientId]:
        """Return who takes part in a round."""
        trained = self.clients - self.unseen
        return participants(trained, self.participation, seed=self.seed, round_=round_)

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return a client's batches of a round."""
        return Batches(
            client=client,
            steps=Steps(self, client, round_),
            examples=len(self.parts[client]),
            seed=_dropout_seed(self.seed, client, round_),
        )

    def everything(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        once = replace(self, plan=Plan(self.plan.batch, steps=None, epochs=1))
        return once.batches(client, 0)

    def test(self, client: ClientId) -> tuple[Tensor, Tensor]:
        """Return a client's own test split."""
        indices = torch.from_numpy(self.test_parts[client])
        return self.x_test[indices], self.data.y_test[indices]


@dataclass(frozen=True, slots=True)
class Steps:
    """The batches of one client in one round; each is cut out of the data when it is needed."""

    federation: Federation
    client: ClientId
    round_: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        own = self.federation.parts[self.client]
        draws = self.federation.plan.draw(
            len(own), seed=self.federation.seed, client=self.client, round_=self.round_
        )
        for positions in draws:
            indices = torch.from_numpy(own[positions])
            yield self.federation.data.x[indices], self.federation.data.y[indices]


def _dropout_seed(seed: int, client: int, round_: int) -> int:
    entropy = np.random.SeedSequence([seed, client, round_, TAG])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


def federation(  # noqa: PLR0913 (what a federation is)
    data: Dataset,
    rule: str,
    plan: Plan,
    *,
    clients: int,
    seed: int,
    participation: float = 1.0,
    unseen: int = 0,
) -> Federation:
    """Divide a data set among clients; each gets a test split of its own mix as well.

    `rule` is a partition such as "gamma=0" or "natural".
    """
    if not 0 <= unseen < clients:
        raise ValueError(f"of {clients} clients, {unseen} cannot be unseen; some must train.")
    participants(clients, participation, seed=seed, round_=1)  # refuses an impossible share
    labels = data.y.cpu().numpy()
    parts = partition(rule, labels, clients=clients, seed=seed, groups=data.groups)
    return Federation(
        data=replace(data, x=_as_seen(data.x, rule, parts, seed)),
        x_test=_as_seen(data.x_test, rule, test := _test_parts(data, rule, parts, seed), seed + 1),
        parts=parts,
        test_parts=test,
        plan=plan,
        seed=seed,
        participation=participation,
        unseen=unseen,
    )


def _test_parts(data: Dataset, rule: str, parts: list[Indices], seed: int) -> list[Indices]:
    groups, groups_test = data.groups, data.groups_test
    if isinstance(parse(rule), Natural) and groups is not None and groups_test is not None:
        return match_groups(groups, parts, groups_test)
    rng = np.random.default_rng([seed, TAG])
    return match_test(data.y.cpu().numpy(), parts, data.y_test.cpu().numpy(), rng)


def _as_seen(x: Tensor, rule: str, parts: list[Indices], seed: int) -> Tensor:
    """Return the samples as their clients see them; the same tensor if all see them as they are."""
    transform: Callable[[Tensor, int, int, int], Tensor] = parse(rule).transform
    seen = x
    for client, part in enumerate(parts):
        own = x[torch.from_numpy(part)]
        changed = transform(own, client, len(parts), seed)
        if changed is not own:
            seen = x.clone() if seen is x else seen
            seen[torch.from_numpy(part)] = changed
    return seen
