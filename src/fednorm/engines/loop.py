"""The loop over clients in one process; other engines replace how it trains a round's clients."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

from torch import Tensor

from fednorm.attacks import apply_attack, find_tracked_layers
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Claim,
    ClientState,
    RejectedReply,
    Reply,
    ServerState,
    download_bytes,
    upload_bytes,
)
from fednorm.core.replies.validation import list_clients
from fednorm.core.round import broadcast, server_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId, nbytes
from fednorm.engines.base import (
    NO_FAULTS,
    ClientSource,
    EngineRun,
    Faults,
    Progress,
    RoundResult,
    train_clients,
)
from fednorm.engines.client_state import ClientStateStore
from fednorm.errors import NoUsableReplyError

log = logging.getLogger("fednorm")

# Trains the clients of a round; returns their results and the answers of their exchanges.
Train: TypeAlias = Callable[
    [Broadcast, Mapping[ClientId, ClientState], Sequence[Batches]],
    tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]],
]


class LoopEngine:
    """Trains client after client; takes every run, and defines what is exact."""

    name = "loop"

    def why_not(self, run: EngineRun) -> None:
        """Return None: this engine takes every run."""

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        return rounds(run.task, run.clients, run.rounds, start, faults=run.faults)


def rounds(
    task: Task,
    clients: ClientSource,
    count: int,
    start: Progress | None = None,
    *,
    train: Train | None = None,
    faults: Faults = NO_FAULTS,
) -> Iterator[RoundResult]:
    """Run federated rounds up to round `count`, training clients by `train`.

    A round with too few usable replies is repeated with other clients; NoUsableReplyError ends the
    run if that does not help.
    """
    state = start.state if start else task.initial_state
    client_states = ClientStateStore(faults.client_state_bytes).with_states(
        start.client_states if start else {}
    )
    runner = _RoundRunner(
        task, clients, train or partial(train_clients, task, byzantine=faults.byzantine), faults
    )
    while state.round < count:
        result = runner.run(state, client_states)
        state, client_states = result.state, result.client_states
        yield result
        del result  # or its replies would be held during the next round


@dataclass(frozen=True, slots=True)
class _RoundRunner:
    task: Task
    clients: ClientSource
    train: Train
    faults: Faults
    registered: dict[ClientId, int] = field(default_factory=dict)  # examples of the first reply

    def run(self, state: ServerState, client_states: ClientStateStore) -> RoundResult:
        """Run one round, again with other clients while too few answer."""
        tried: set[ClientId] = set()
        rejected: tuple[RejectedReply, ...] = ()
        dropped_out = attempt = 0
        while True:
            number = state.round + 1
            asked = self.faults.sample_clients(self.clients, number, attempt, tried)
            answering = self.faults.surviving(asked, number, attempt)
            dropped_out += len(asked) - len(answering)
            try:
                result = self._attempt(state, client_states, answering)
            except NoUsableReplyError as error:
                tried |= set(asked)
                if not self.faults.can_retry(self.clients, attempt, tried):
                    raise
                log.warning("%s It is repeated with other clients.", error)
                rejected += error.rejected
                attempt += 1
                continue
            rejected += result.rejected
            return replace(result, rejected=rejected, dropped_out=dropped_out, retries=attempt)

    def _attempt(
        self, state: ServerState, client_states: ClientStateStore, answering: list[ClientId]
    ) -> RoundResult:
        task, adversary = self.task, self.faults.adversary
        if not answering:
            raise NoUsableReplyError(state.round + 1, ())
        received = broadcast(task, state)
        batches = [self.clients.batches(client, received.round) for client in answering]
        results, answers = self.train(received, client_states, batches)
        own = sorted((reply for reply, _ in results), key=lambda reply: reply.client)
        replies = apply_attack(
            own, adversary, received.round, tracked=find_tracked_layers(task, received)
        )
        claims = {own.client: self._find_claim(own) for own in batches}
        state = server_round(task, state, replies, asked=claims, minimum=self.faults.min_replies)
        gone = list_clients(state.rejected)
        for reply in replies:
            if reply.client not in gone:
                self.registered.setdefault(reply.client, reply.examples)
        exchanged = nbytes(answers.values())
        return RoundResult(
            state=state,
            client_states=client_states.with_states(
                {reply.client: client_state for reply, client_state in results}
            ),
            train_loss=_mean_loss(replies, state.rejected),
            exchanges=1 + len(answers),
            bytes_up=fmean(upload_bytes(reply) for reply in replies) + exchanged,
            bytes_down=download_bytes(received) + exchanged,
            replies=replies,
            rejected=state.rejected,
        )

    def _find_claim(self, own: Batches) -> Claim:
        """Return what a client may claim; of remote clients no more than at their first reply."""
        measures = self.task.strategy.measures
        measured = self.clients.all_batches(own.client) if measures else None
        claim = self.faults.limits.find_claim(self.task, own, measured)
        if self.faults.limits.max_examples is None and self.faults.limits.remote:
            return replace(claim, examples=self.registered.get(own.client, claim.examples))
        return claim


def _mean_loss(replies: Sequence[Reply], rejected: Sequence[RejectedReply]) -> float:
    gone = list_clients(rejected)
    used = [reply for reply in replies if reply.client not in gone]
    return fmean((reply.loss for reply in used), (reply.examples for reply in used))
