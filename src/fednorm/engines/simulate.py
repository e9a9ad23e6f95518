"""The loop over clients in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from torch import Tensor

from fednorm.core.exchange import PendingError, Replay, Solo, answer
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Memory,
    Reply,
    ServerState,
    bytes_down,
    bytes_up,
)
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.clients import Clients
from fednorm.engines.survey import Ask, Asked, survey


@dataclass(frozen=True, slots=True)
class Round:
    """What is known after a round."""

    state: ServerState
    memories: Mapping[ClientId, Memory]
    train_loss: float  # mean over clients, weighted by their examples
    exchanges: int
    bytes_up: float  # of one client, in the mean
    bytes_down: float
    replies: Sequence[Reply] = ()


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
    ask: Ask | None = None,
) -> Iterator[Round]:
    """Run federated rounds one after the other, up to round `count`."""
    state = start.state if start else task.initial_state
    memories: dict[ClientId, Memory] = dict(start.memories) if start else {}
    while state.round < count:
        taking_part = clients.participants(state.round + 1)
        asked = Asked(0, 0.0, 0.0)
        if task.strategy.survey == "rounds":
            state, asked = survey(task, state, memories, clients, taking_part, ask)
        received = broadcast(task, state)
        batches = [clients.batches(client, received.round) for client in taking_part]
        results, answers = (train or train_in_turn)(task, received, memories, batches)
        replies = sorted((reply for reply, _ in results), key=lambda reply: reply.client)
        state = server_round(task, state, replies)
        memories = {**memories, **{reply.client: memory for reply, memory in results}}
        exchanged = sum(t.numel() * t.element_size() for t in answers.values())
        yield Round(
            state=state,
            memories=memories,
            train_loss=fmean(
                (reply.metrics["loss"] for reply in replies), (reply.examples for reply in replies)
            ),
            exchanges=1 + len(answers) + asked.exchanges,
            bytes_up=fmean(bytes_up(reply) for reply in replies) + exchanged + asked.bytes_up,
            bytes_down=bytes_down(received) + exchanged + asked.bytes_down,
            replies=replies,
        )


def train_in_turn(
    task: Task,
    received: Broadcast,
    memories: Mapping[ClientId, Memory],
    batches: Sequence[Batches],
) -> tuple[list[tuple[Reply, Memory]], dict[str, Tensor]]:
    """Train all clients, again and again while they wait for answers of an exchange."""
    if len(batches) == 1:  # a client that is alone waits for nobody
        solo, (own,) = Solo(), batches
        memory = memories.get(own.client, Memory())
        return [client_round(task, received, memory, own, solo)], solo.answers
    answers: dict[str, Tensor] = {}
    while True:
        results: list[tuple[Reply, Memory]] = []
        waiting: dict[ClientId, PendingError] = {}
        for own in batches:
            memory = memories.get(own.client, Memory())
            try:
                results.append(client_round(task, received, memory, own, Replay(answers)))
            except PendingError as pending:
                waiting[own.client] = pending
        if not waiting:
            return results, answers
        pending_ones = [waiting[client] for client in sorted(waiting)]
        answers[pending_ones[0].site] = answer(pending_ones, task.aggregate_statistics)
