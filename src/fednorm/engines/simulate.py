"""The loop over clients in one process."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

from torch import Tensor

from fednorm.attacks import apply_attack, find_tracked_layers
from fednorm.core.inspect import clients_of
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Memory,
    Rejected,
    Reply,
    ServerState,
    bytes_down,
    bytes_up,
)
from fednorm.core.round import NoUsableReplyError, broadcast, server_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.clients import Clients, train_in_turn
from fednorm.engines.conditions import USUAL, Conditions
from fednorm.engines.kept import Kept

log = logging.getLogger("fednorm")


@dataclass(frozen=True, slots=True)
class Round:
    """What is known after a round."""

    state: ServerState
    memories: Kept
    train_loss: float  # mean over clients, weighted by their examples
    exchanges: int
    bytes_up: float  # of one client, in the mean
    bytes_down: float
    replies: Sequence[Reply] = ()  # as they arrived
    rejected: tuple[Rejected, ...] = ()  # of all attempts
    vanished: int = 0  # clients that did not answer
    repeated: int = 0  # how often the round was run again with other clients
    tested: ServerState | None = None  # with the statistics of the evaluation, if there was one


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins that was begun before."""

    state: ServerState
    memories: Mapping[ClientId, Memory]


Train: TypeAlias = Callable[
    [Task, Broadcast, Mapping[ClientId, Memory], Sequence[Batches]],
    tuple[list[tuple[Reply, Memory]], dict[str, Tensor]],
]


def rounds(
    task: Task,
    clients: Clients,
    count: int,
    start: Start | None = None,
    *,
    train: Train | None = None,
    conditions: Conditions = USUAL,
) -> Iterator[Round]:
    """Run federated rounds one after the other, up to round `count`.

    A round with too few good replies is repeated with other clients; NoUsableReplyError ends the
    run if that does not help.
    """
    state = start.state if start else task.initial_state
    memories = Kept(conditions.personal_bytes).after(start.memories if start else {})
    engine = _Engine(
        task,
        clients,
        train or partial(train_in_turn, byzantine=conditions.byzantine),
        conditions,
    )
    while state.round < count:
        result = engine.round(state, memories)
        state, memories = result.state, result.memories
        yield result
        del result  # or its replies would be held during the next round


@dataclass(frozen=True, slots=True)
class _Engine:
    task: Task
    clients: Clients
    train: Train
    conditions: Conditions

    def round(self, state: ServerState, memories: Kept) -> Round:
        """Run one round, again and again while too few clients answer."""
        tried: set[ClientId] = set()
        rejected: tuple[Rejected, ...] = ()
        vanished = attempt = 0
        while True:
            number = state.round + 1
            asked = self.conditions.asked(self.clients, number, attempt, tried)
            answering = self.conditions.answering(asked, number, attempt)
            vanished += len(asked) - len(answering)
            try:
                result = self._attempt(state, memories, answering)
            except NoUsableReplyError as error:
                tried |= set(asked)
                if not self.conditions.may_repeat(self.clients, attempt, tried):
                    raise
                log.warning("%s It is repeated with other clients.", error)
                rejected += error.rejected
                attempt += 1
                continue
            return replace(
                result, rejected=rejected + result.rejected, vanished=vanished, repeated=attempt
            )

    def _attempt(self, state: ServerState, memories: Kept, answering: list[ClientId]) -> Round:
        task, adversary = self.task, self.conditions.adversary
        if not answering:
            raise NoUsableReplyError(state.round + 1, ())
        received = broadcast(task, state)
        batches = [self.clients.batches(client, received.round) for client in answering]
        results, answers = self.train(task, received, memories, batches)
        own = sorted((reply for reply, _ in results), key=lambda reply: reply.client)
        replies = apply_attack(
            own, adversary, received.round, tracked=find_tracked_layers(task, received)
        )
        state = server_round(
            task, state, replies, asked=answering, minimum=self.conditions.minimum_replies
        )
        exchanged = sum(t.numel() * t.element_size() for t in answers.values())
        return Round(
            state=state,
            memories=memories.after({reply.client: memory for reply, memory in results}),
            train_loss=_mean_loss(replies, state.rejected),
            exchanges=1 + len(answers),
            bytes_up=fmean(bytes_up(reply) for reply in replies) + exchanged,
            bytes_down=bytes_down(received) + exchanged,
            replies=replies,
            rejected=state.rejected,
        )


def _mean_loss(replies: Sequence[Reply], rejected: Sequence[Rejected]) -> float:
    gone = clients_of(rejected)
    used = [reply for reply in replies if reply.client not in gone]
    return fmean((reply.metrics["loss"] for reply in used), (reply.examples for reply in used))
