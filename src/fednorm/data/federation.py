"""A data set divided among clients: the participants and batches of every round."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from fednorm.core.messages import Batches
from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.types import ClientId
from fednorm.data.dataset import Dataset
from fednorm.data.partition import PARTITIONS, Partition, create_partition, partition
from fednorm.data.partition.base import Indices, match_groups, match_test
from fednorm.data.partition.feature_shift import FeatureShift
from fednorm.data.partition.label_skew import (
    Dirichlet,
    DirichletUnbalanced,
    Gamma,
    Natural,
    Shards,
)
from fednorm.data.sampling import Plan, count_participants, draw_participants
from fednorm.data.transforms import Batch
from fednorm.names import warn_once

_MOST_COUNTS = 100_000  # clients times classes; more would not fit a page


@dataclass(frozen=True, slots=True)
class Federation:
    """A data set divided among clients; every tensor is held once."""

    data: Dataset  # its training samples are transformed for their clients
    x_test: Tensor  # test samples, transformed for their clients; `data.x_test` is not
    parts: list[Indices]
    test_parts: list[Indices]
    plan: Plan
    seed: int
    participation: float = 1.0
    unseen: int = 0  # number of clients, the last ones, that never train
    independent: bool = False  # clients are drawn one by one, so that their number varies

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.parts)

    def all(self) -> list[ClientId]:
        """Return every client that trains."""
        return list(range(self.clients - self.unseen))

    def count_labels(self) -> tuple[tuple[int, ...], ...]:
        """Return each client's training samples of each class; nothing where labels are masks."""
        y, classes = self.data.y, self.data.classes
        if self.data.target != "class" or self.clients * classes > _MOST_COUNTS:
            return ()
        labels = y.cpu().numpy()
        counts = (np.bincount(labels[part], minlength=classes) for part in self.parts)
        return tuple(tuple(int(n) for n in row) for row in counts)

    def participants(self, round_: int) -> list[ClientId]:
        """Return the clients that take part in a round."""
        trained = self.clients - self.unseen
        return draw_participants(
            trained,
            self.participation,
            seed=self.seed,
            round_=round_,
            independent=self.independent,
        )

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return a client's batches of a round."""
        return Batches(
            client=client,
            steps=Steps(self, client, round_),
            examples=len(self.parts[client]),
            seed=_derive_dropout_seed(self.seed, client, round_),
            all_data=Steps(self.once(), client, 0),
            batch_sizes=self.plan.lengths(len(self.parts[client])),
        )

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's data once, in batches."""
        return self.once().batches(client, 0)

    def once(self) -> "Federation":
        """Return a federation whose clients see all their data once per round."""
        return replace(self, plan=Plan(self.plan.batch, steps=None, epochs=1))

    def test(self, client: ClientId) -> Iterator[Batch]:
        """Yield batches of a client's test split."""
        own = replace(self.data, x_test=self.x_test)
        return own.test_batches(self.test_parts[client])


@dataclass(frozen=True, slots=True)
class Steps:
    """The batches of one client in one round, each made when it is needed."""

    federation: Federation
    client: ClientId
    round_: int

    def __iter__(self) -> Iterator[Batch]:
        data, key = self.federation.data, (self.federation.seed, self.client, self.round_)
        for step, chosen in enumerate(self.draw_indices()):
            # Making a generator takes as long as making a small batch.
            rng = (
                np.random.default_rng([*key, step, Stream.AUGMENTATION])
                if data.transform.is_random
                else None
            )
            yield data.training_batch(chosen, rng)

    def draw_indices(self) -> Iterator[Indices]:
        """Draw the sample numbers of each batch."""
        own = self.federation.parts[self.client]
        draws = self.federation.plan.draw(
            len(own), seed=self.federation.seed, client=self.client, round_=self.round_
        )
        return (own[positions] for positions in draws)


def interleave_batches(parts: Sequence[Iterable[Batch]]) -> Iterator[Batch]:
    """Merge the batches of several clients: the first sample of each, then the next.

    All clients must have batches of the same sizes.
    """
    steps = [own for own in parts if isinstance(own, Steps)]
    data = steps[0].federation.data if len(steps) == len(parts) else None
    if data and not data.transform.is_random:  # one index for all is faster for small batches
        for chosen in zip(*(own.draw_indices() for own in steps), strict=True):
            yield data.training_batch(np.stack(chosen, 1).ravel())
        return
    for batches in zip(*parts, strict=True):
        x, y = (torch.stack(same, 1).flatten(0, 1) for same in zip(*batches, strict=True))
        yield x, y


def _derive_dropout_seed(seed: int, client: int, round_: int) -> int:
    # A tenth of the time of numpy's SeedSequence, which matters in a round of small clients.
    key = struct.pack("<4q", seed, client, round_, Stream.MODEL_DROPOUT)
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


def build_federation(  # noqa: PLR0913 (what a federation is)
    data: Dataset,
    rule: str | Partition,
    plan: Plan,
    *,
    clients: int,
    seed: int,
    participation: float = 1.0,
    unseen: int = 0,
    independent: bool = False,
) -> Federation:
    """Divide a data set among clients; test splits follow the clients' class mix.

    `rule` is a partition, or text such as "gamma=0" or "natural".
    """
    if not 0 <= unseen < clients:
        raise ValueError(f"of {clients} clients, {unseen} cannot be unseen; some must train.")
    count_participants(clients, participation)  # refuses an impossible share
    chosen = create_partition(rule) if isinstance(rule, str) else rule
    _check_partition(data, chosen)
    parts = partition(chosen, data.labels(), clients=clients, seed=seed, groups=data.groups)
    test = _split_test(data, chosen, parts, seed)
    return Federation(
        data=replace(data, x=_apply_client_transform(data.x, chosen, parts, seed)),
        x_test=_apply_client_transform(data.x_test, chosen, test, seed + 1),
        parts=parts,
        test_parts=test,
        plan=plan,
        seed=seed,
        participation=participation,
        unseen=unseen,
        independent=independent,
    )


def _check_partition(data: Dataset, chosen: Partition) -> None:
    """Refuse a partition that the kind of data does not allow."""
    inner = create_partition(chosen.labels) if isinstance(chosen, FeatureShift) else chosen
    name = PARTITIONS.name_of(type(chosen)) or repr(chosen)
    by_class = isinstance(inner, Gamma | Shards | Dirichlet | DirichletUnbalanced)
    if by_class and not data.has_classes:
        raise ValueError(
            f"partition {name!r} divides samples by their class, but each sample of "
            f"{data.name!r} has several targets; choose 'iid', 'natural' or 'feature_shift'."
        )
    tokens = not data.x.is_floating_point() and data.x.dtype != torch.uint8
    if tokens and isinstance(chosen, FeatureShift):
        raise ValueError(
            f"partition {name!r} changes the values of samples, but those of {data.name!r} are "
            f"{data.x.dtype}, names of tokens; choose another partition."
        )
    if data.given and not isinstance(inner, Natural):
        groups = 0 if data.groups is None else len(np.unique(data.groups))
        warn_once(
            f"the data {data.name!r} are divided among {groups} clients, but partition {name!r} "
            "mixes them; partition 'natural' keeps them."
        )


def _split_test(data: Dataset, rule: Partition, parts: list[Indices], seed: int) -> list[Indices]:
    groups, groups_test = data.groups, data.groups_test
    if isinstance(rule, Natural) and groups is not None and groups_test is not None:
        return match_groups(groups, parts, groups_test)
    rng = make_rng(seed, Stream.TEST_PARTS)
    return match_test(data.labels(), parts, data.labels(test=True), rng)


def _apply_client_transform(x: Tensor, rule: Partition, parts: list[Indices], seed: int) -> Tensor:
    """Transform samples for their clients; return `x` itself if nothing changes."""
    if type(rule).transform is Partition.transform:
        return x
    seen = x.clone() if x.is_floating_point() else x.float() / 255
    for client, part in enumerate(parts):
        own = torch.from_numpy(part)
        seen[own] = rule.transform(seen[own], client, len(parts), seed)
    return seen
