"""One round: what a client does and what the server does. All that an engine calls."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fednorm.core.aggregator import Aggregator
from fednorm.core.algorithm import Trained, Work
from fednorm.core.exchange import Exchange, Solo
from fednorm.core.inspect import inspect
from fednorm.core.layer import Session
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Memory,
    Rejected,
    Reply,
    Running,
    ServerState,
)
from fednorm.core.randomness import own_randomness
from fednorm.core.strategy import Merge
from fednorm.core.task import Task, load, snapshot
from fednorm.core.types import ClientId, Tensors


class NonFiniteLossError(ArithmeticError):
    """A client's loss became NaN or infinite."""

    def __init__(self, client: ClientId, round_: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss} in round {round_} at client {client}; "
            "lower the learning rate, or choose another strategy."
        )
        self.client, self.round, self.loss = client, round_, loss

    def __reduce__(self) -> tuple[type, tuple[ClientId, int, float]]:
        """Let it come from another process as it is."""
        return type(self), (self.client, self.round, self.loss)


class NoUsableReplyError(ArithmeticError):
    """A round to which no client gave an answer that can be used."""

    def __init__(self, round_: int, rejected: Sequence[Rejected]) -> None:
        reasons = "; ".join(f"client {r.client}: {r.reason}" for r in rejected) or "none arrived"
        super().__init__(f"round {round_} has no usable reply ({reasons}).")


def broadcast(task: Task, state: ServerState) -> Broadcast:
    """Return what the server sends to the clients of its next round."""
    return Broadcast(
        round=state.round + 1,
        rounds=task.rounds,
        weights=state.weights,
        buffers=state.buffers,
        running=state.running,
        momentum=state.momentum,
        notes=state.notes,
    )


def client_round(
    task: Task,
    received: Broadcast,
    memory: Memory,
    batches: Batches,
    exchange: Exchange | None = None,
) -> tuple[Reply, Memory]:
    """Train one client for one round; a pure function of its arguments.

    `exchange` answers strategies that talk in the middle of a round; without it the client is
    alone. Raises NonFiniteLossError when training diverges.
    """
    load(task, received, memory)
    session = Session(exchange or Solo(), sizes=batches.sizes)
    begin(task, received, session)
    counted = replace(batches, steps=_Counted(batches, session))
    with own_randomness(batches.seed, task.model):
        trained = task.algorithm.local(_work(task, received, memory, counted))
    if not math.isfinite(trained.loss):
        raise NonFiniteLossError(batches.client, received.round, trained.loss)
    kept = Memory(tensors=snapshot(task.layout.personal), optimizer=trained.optimizer)
    return reply(task, batches.client, trained), kept


@dataclass(frozen=True, slots=True)
class _Counted:
    """The batches of a round, telling the layers which step this is."""

    batches: Batches
    session: Session

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(self.batches.steps):
            self.session.step = step
            yield batch


def begin(task: Task, received: Broadcast, session: Session) -> None:
    """Let the layers of the workspace follow the round's rule and forget what they recorded."""
    if not task.model.training:
        task.model.train()
    rule = task.strategy.rule(received)
    for path, layer in task.layout.norms.items():
        layer.begin(rule, session, path)


def _work(task: Task, received: Broadcast, memory: Memory, batches: Batches) -> Work:
    frozen = set() if task.strategy.trains_affine(received) else set(task.layout.affine)

    def learning(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {n: p for n, p in parameters.items() if p.requires_grad and p not in frozen}

    return Work(
        model=task.model,
        loss=task.loss,
        shared=learning(dict(task.layout.shared)),
        personal=learning(dict(task.layout.personal_parameters)),
        batches=batches,
        broadcast=received,
        optimizer=memory.optimizer,
    )


def reply(task: Task, client: ClientId, trained: Trained) -> Reply:
    """Return what a client sends: its update, and what the layers of the workspace recorded."""
    reports = {
        path: layer.report(task.strategy.statistics) for path, layer in task.layout.sharing.items()
    }
    return Reply(
        client=client,
        examples=trained.examples,
        update=trained.update,
        buffers=snapshot(task.layout.buffers),
        stats={path: report for path, report in reports.items() if report is not None},
        momentum=trained.momentum,
        metrics={"loss": trained.loss},
    )


def server_round(task: Task, state: ServerState, replies: Sequence[Reply]) -> ServerState:
    """Merge the replies of one round into the next state; a pure function of its arguments.

    Clients that did not answer are simply absent, and a faulty reply is rejected by name: the
    statistics are exact for those that remain.
    """
    good, rejected = inspect(replies)
    if not good:
        raise NoUsableReplyError(state.round + 1, rejected)
    update = _aggregate([r.update for r in good], good, task.aggregate)
    running = {path: _merged(task, state, path, good) for path in state.running}
    return replace(
        state,
        round=state.round + 1,
        weights={**state.weights, **task.algorithm.apply(state, update, task.rounds)},
        buffers=_buffers(good, task.aggregate),
        running=running,
        momentum=_aggregate([r.momentum for r in good], good, task.aggregate),
        notes=task.strategy.remember(state, running),
        rejected=rejected,
    )


def _buffers(replies: Sequence[Reply], aggregate: Aggregator) -> dict[str, Tensor]:
    """Aggregate buffers; one on which all clients agree stays as it is, to the bit."""
    merged = _aggregate([r.buffers for r in replies], replies, aggregate)
    first = replies[0].buffers
    agreed = {n for n in merged if all(torch.equal(r.buffers[n], first[n]) for r in replies)}
    return {name: first[name] if name in agreed else value for name, value in merged.items()}


def _aggregate(
    parts: Sequence[Tensors], replies: Sequence[Reply], aggregate: Aggregator
) -> dict[str, Tensor]:
    weights = torch.tensor([r.examples for r in replies], dtype=torch.float64)
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {
        # Integers are indices and counters: an average of them means nothing.
        name: aggregate(values, weights) if values.is_floating_point() else values.amax(0)
        for name, values in stacked.items()
    }


def _merged(task: Task, state: ServerState, path: str, replies: Sequence[Reply]) -> Running:
    heard = [reply for reply in replies if path in reply.stats]
    if not heard:
        return state.running[path]
    return task.strategy.merge(
        state.running[path],
        Merge(
            reports=[reply.stats[path] for reply in heard],
            examples=[reply.examples for reply in heard],
            aggregate=task.aggregate_statistics,
            layer=task.layout.sharing[path],
        ),
    )
