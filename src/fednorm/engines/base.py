"""What all engines share: their interface, a run as they see it, clients, and faults."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks import DataAttack
from fednorm.attacks.adversary import Adversary
from fednorm.attacks.base import DataInfo
from fednorm.core.layer import Exchange, PendingError, Replay, Solo, answer_exchange
from fednorm.core.messages import (
    LARGEST,
    Batches,
    Broadcast,
    Claim,
    ClientState,
    LayerUse,
    RejectedReply,
    Reply,
    ServerState,
)
from fednorm.core.random_streams import Stream
from fednorm.core.round import client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.data.sampling import Plan
from fednorm.engines.client_state import LIMIT, ClientStateStore
from fednorm.errors import NonFiniteLossError

ATTEMPTS = 5  # at one round, before a run gives up


class ClientSource(Protocol):
    """Where an engine gets clients and their batches from."""

    def all(self) -> list[ClientId]:
        """Return every client."""

    def participants(self, round_: int) -> list[ClientId]:
        """Return the clients that take part in `round_`: all, unless a class says else."""
        del round_
        return self.all()

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return the batches of `client` in `round_`."""

    def all_batches(self, client: ClientId) -> Batches:
        """Return all data of `client` once, in batches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of clients before they answer, and so bounds what they may claim."""

    layers: Mapping[str, LayerUse] = field(default_factory=dict)  # as far as it is known
    max_examples: int | None = None  # of any client
    remote: bool = False  # clients hold data that are not known here
    plan: Plan | None = None  # of the local work of remote clients

    def find_claim(
        self,
        task: Task,
        own: Batches,
        measured: Batches | None = None,
        registered: int | None = None,
    ) -> Claim:
        """Return what a client may claim in a round, before which it may have `measured` data.

        `registered` is the weight of the first reply of a remote client.
        """
        largest, seen = max(own.batch_sizes, default=0), measured or own
        if self.remote:
            return self._find_remote_claim(task, own, registered, measures=measured is not None)
        if not largest or not seen.batch_sizes:
            return self._apply_maximum(Claim())
        return self._apply_maximum(
            Claim(
                examples=task.algorithm.examples(own, largest),
                samples=sum(seen.batch_sizes) if measured else largest,
                batches=len(seen.batch_sizes),
                layers=self.layers,
            )
        )

    def _find_remote_claim(
        self, task: Task, own: Batches, registered: int | None, *, measures: bool
    ) -> Claim:
        """Return what a client with unknown data may claim: its work is known."""
        plan = self.plan
        most = registered if self.max_examples is None else self.max_examples
        most = LARGEST if most is None else most
        if plan is None:
            return Claim(most)
        largest = plan.batch + (plan.steps is None)  # a last sample joins the batch before it
        weight = task.algorithm.examples(replace(own, examples=LARGEST), largest)
        held = most if weight == LARGEST else LARGEST  # samples
        weight = min(weight, most)
        if measures:
            return Claim(weight)
        batches = plan.steps or (plan.epochs or 1) * -(-held // plan.batch)
        calls = {path: replace(use, values=LARGEST) for path, use in self.layers.items()}
        return Claim(weight, largest, min(batches, Claim().batches), calls)

    def find_calibration_claim(self, own: Batches) -> Claim:
        """Return what a client may claim in a calibration on all its data."""
        sizes = own.batch_sizes
        if self.remote or not sizes:
            return self._apply_maximum(Claim())
        return self._apply_maximum(Claim(own.examples, samples=sum(sizes), batches=len(sizes)))

    def _apply_maximum(self, claim: Claim) -> Claim:
        most = self.max_examples
        return claim if most is None else replace(claim, examples=min(claim.examples, most))


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a run; by default all clients are honest and answer."""

    adversary: Adversary | None = None
    client_dropout: float = 0.0  # probability that a client drops out in mid-round
    min_replies: int = 1  # usable ones that a round needs
    seed: int = 0
    client_state_bytes: int = LIMIT  # of client states held in memory; the rest is on disk
    limits: Limits = NO_LIMITS
    rollback: bool = False  # undo rounds after which clients' losses explode

    @property
    def faultless(self) -> bool:
        """Whether clients fail only by diverging."""
        some = self.adversary is not None or self.rollback or self.client_dropout > 0
        return not some and self.min_replies <= 1

    @property
    def byzantine(self) -> frozenset[ClientId]:
        """The Byzantine clients."""
        return self.adversary.clients if self.adversary else frozenset()

    def sample_clients(
        self, clients: ClientSource, round_: int, attempt: int, before: Collection[ClientId]
    ) -> list[ClientId]:
        """Return the clients of an attempt; a later one prefers clients not in `before`."""
        first = clients.participants(round_)
        if not attempt:
            return first
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.RETRY_CLIENTS])
        drawn = rng.permutation(clients.all()).tolist()
        fresh_first = sorted(drawn, key=lambda client: client in before)
        return sorted(fresh_first[: len(first)])

    def surviving(self, asked: Sequence[ClientId], round_: int, attempt: int) -> list[ClientId]:
        """Return the clients of `asked` that do not drop out."""
        if not self.client_dropout:
            return list(asked)
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.CLIENT_DROPOUT])
        stays = rng.random(len(asked)) >= self.client_dropout
        return [client for client, here in zip(asked, stays.tolist(), strict=True) if here]

    def can_retry(self, clients: ClientSource, attempt: int, tried: Collection[ClientId]) -> bool:
        """Return whether another attempt is allowed and could end differently."""
        others = any(client not in tried for client in clients.all())
        return attempt + 1 < ATTEMPTS and (others or self.client_dropout > 0)


NO_FAULTS = Faults()


class Progress(Protocol):
    """How far a run is: a checkpoint, or the result of a round."""

    @property
    def state(self) -> ServerState:
        """The server's state."""

    @property
    def client_states(self) -> Mapping[ClientId, ClientState]:
        """What clients keep."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: the states after it, what it cost, and what went wrong."""

    state: ServerState
    client_states: ClientStateStore
    train_loss: float  # mean over clients, weighted by their examples
    exchanges: int
    bytes_up: float  # mean over clients
    bytes_down: float
    replies: Sequence[Reply] = ()  # as they arrived
    rejected: tuple[RejectedReply, ...] = ()  # of all attempts
    dropped_out: int = 0  # clients that did not answer
    retries: int = 0  # attempts after the first one, with other clients
    tested: ServerState | None = None  # with the statistics of the evaluation, if there was one


@dataclass(frozen=True, slots=True)
class EngineRun:
    """A run as an engine sees it."""

    task: Task
    clients: ClientSource
    rounds: int
    engine: str = "auto"  # that was asked for
    faults: Faults = NO_FAULTS
    ours: bool = False  # the model is one of the library's own
    participation: float = 1.0  # share of clients in a round
    segmentation: bool = False  # labels are masks
    threads: int = 1  # of each process
    processes: int = 1  # that may train clients at the same time
    step_seconds: float = 0.0  # of one step of one client
    timeout: float = float("inf")  # seconds after which a process that does nothing is replaced
    remote: "Engine | None" = None  # reaches clients on other machines

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.task.model.parameters()).device

    def list_first_batches(self) -> list[Batches]:
        """Return the batches of the first round, one value for each client that takes part."""
        chosen = self.clients.participants(1) or self.clients.all()  # by chance there are none
        return [self.clients.batches(client, 1) for client in chosen]


class Engine(Protocol):
    """Trains the clients of a run, exactly as one after the other would."""

    @property
    def name(self) -> str:
        """The name by which users ask for it."""

    def why_not(self, run: EngineRun) -> str | None:
        """Return why this engine cannot train `run` exactly, or None if it can."""

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""


def train_client(
    task: Task,
    received: Broadcast,
    client_state: ClientState,
    batches: Batches,
    exchange: Exchange,
    byzantine: Collection[ClientId] = (),
) -> tuple[Reply, ClientState]:
    """Train one client for one round.

    An honest client that diverges ends the run. A Byzantine one, or one of a private run, replies
    with its loss, so that the server rejects the reply.
    """
    try:
        return client_round(task, received, client_state, batches, exchange)
    except NonFiniteLossError as error:
        # In a private run no client can end it.
        if batches.client not in byzantine and not task.privacy:
            raise
        return Reply(batches.client, batches.examples, {}, {}, {}, loss=error.loss), client_state


def train_clients(
    task: Task,
    received: Broadcast,
    client_states: Mapping[ClientId, ClientState],
    batches: Sequence[Batches],
    byzantine: Collection[ClientId] = (),
) -> tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]]:
    """Train clients in turn, anew after each exchange; return results and answers."""
    if len(batches) == 1:  # a single client has the mean itself
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


@dataclass(frozen=True, slots=True)
class PoisonedClients:
    """A client source in which Byzantine clients train on poisoned data."""

    clients: ClientSource
    adversary: Adversary
    data_info: DataInfo

    def all(self) -> list[ClientId]:
        """Return every client."""
        return self.clients.all()

    def participants(self, round_: int) -> list[ClientId]:
        """Return the clients that take part in `round_`."""
        return self.clients.participants(round_)

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return the batches of `client` in `round_`."""
        return self._poison(self.clients.batches(client, round_), round_)

    def all_batches(self, client: ClientId) -> Batches:
        """Return all data of `client` once, in batches."""
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
            yield attack.poison(x, y, self.source.data_info, rng)
