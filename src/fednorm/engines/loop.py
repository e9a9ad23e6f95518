"""The loop over clients in one process."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

from torch import Tensor

from fednorm.attacks import apply_attack, find_tracked_layers
from fednorm.core.messages import (
    Batches,
    Broadcast,
    ClientState,
    RejectedReply,
    Reply,
    ServerState,
    download_bytes,
    upload_bytes,
)
from fednorm.core.round import broadcast, server_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId, nbytes
from fednorm.core.validation import list_clients
from fednorm.engines.base import NO_FAULTS, ClientSource, Faults, train_clients
from fednorm.engines.client_state import ClientStateStore
from fednorm.errors import NoUsableReplyError

log = logging.getLogger("fednorm")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What is known after a round."""

    state: ServerState
    client_states: ClientStateStore
    train_loss: float  # mean over clients, weighted by their examples
    exchanges: int
    bytes_up: float  # of one client, in the mean
    bytes_down: float
    replies: Sequence[Reply] = ()  # as they arrived
    rejected: tuple[RejectedReply, ...] = ()  # of all attempts
    dropped_out: int = 0  # clients that did not answer
    retries: int = 0  # how often the round was run again with other clients
    tested: ServerState | None = None  # with the statistics of the evaluation, if there was one


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins that was begun before."""

    state: ServerState
    client_states: Mapping[ClientId, ClientState]


Train: TypeAlias = Callable[
    [Task, Broadcast, Mapping[ClientId, ClientState], Sequence[Batches]],
    tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]],
]


def rounds(
    task: Task,
    clients: ClientSource,
    count: int,
    start: Start | None = None,
    *,
    train: Train | None = None,
    conditions: Faults = NO_FAULTS,
) -> Iterator[RoundResult]:
    """Run federated rounds one after the other, up to round `count`.

    A round with too few good replies is repeated with other clients; NoUsableReplyError ends the
    run if that does not help.
    """
    state = start.state if start else task.initial_state
    client_states = ClientStateStore(conditions.client_state_bytes).updated(
        start.client_states if start else {}
    )
    engine = _Engine(
        task,
        clients,
        train or partial(train_clients, byzantine=conditions.byzantine),
        conditions,
    )
    while state.round < count:
        result = engine.round(state, client_states)
        state, client_states = result.state, result.client_states
        yield result
        del result  # or its replies would be held during the next round


@dataclass(frozen=True, slots=True)
class _Engine:
    task: Task
    clients: ClientSource
    train: Train
    conditions: Faults

    def round(self, state: ServerState, client_states: ClientStateStore) -> RoundResult:
        """Run one round, again and again while too few clients answer."""
        tried: set[ClientId] = set()
        rejected: tuple[RejectedReply, ...] = ()
        vanished = attempt = 0
        while True:
            number = state.round + 1
            asked = self.conditions.sample_clients(self.clients, number, attempt, tried)
            answering = self.conditions.surviving(asked, number, attempt)
            vanished += len(asked) - len(answering)
            try:
                result = self._attempt(state, client_states, answering)
            except NoUsableReplyError as error:
                tried |= set(asked)
                if not self.conditions.can_retry(self.clients, attempt, tried):
                    raise
                log.warning("%s It is repeated with other clients.", error)
                rejected += error.rejected
                attempt += 1
                continue
            return replace(
                result, rejected=rejected + result.rejected, dropped_out=vanished, retries=attempt
            )

    def _attempt(
        self, state: ServerState, client_states: ClientStateStore, answering: list[ClientId]
    ) -> RoundResult:
        task, adversary = self.task, self.conditions.adversary
        if not answering:
            raise NoUsableReplyError(state.round + 1, ())
        received = broadcast(task, state)
        batches = [self.clients.batches(client, received.round) for client in answering]
        results, answers = self.train(task, received, client_states, batches)
        own = sorted((reply for reply, _ in results), key=lambda reply: reply.client)
        replies = apply_attack(
            own, adversary, received.round, tracked=find_tracked_layers(task, received)
        )
        state = server_round(
            task, state, replies, asked=answering, minimum=self.conditions.min_replies
        )
        exchanged = nbytes(answers.values())
        return RoundResult(
            state=state,
            client_states=client_states.updated(
                {reply.client: client_state for reply, client_state in results}
            ),
            train_loss=_mean_loss(replies, state.rejected),
            exchanges=1 + len(answers),
            bytes_up=fmean(upload_bytes(reply) for reply in replies) + exchanged,
            bytes_down=download_bytes(received) + exchanged,
            replies=replies,
            rejected=state.rejected,
        )


def _mean_loss(replies: Sequence[Reply], rejected: Sequence[RejectedReply]) -> float:
    gone = list_clients(rejected)
    used = [reply for reply in replies if reply.client not in gone]
    return fmean((reply.metrics["loss"] for reply in used), (reply.examples for reply in used))
