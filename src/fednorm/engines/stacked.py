"""Small models: several clients, each with its weights, in one set of tensor operations.

A step of a small model costs as much as calling its operations, not as their arithmetic. Stacked
clients share a wide model (`nn/stacked_model.py`), trained by the same `client_round` that trains
one client: the update of each is its part of the wide update. Equal to the loop within rounding;
whether that holds for a model is tried before the run.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednorm.core.layer import Replay
from fednorm.core.layout import find_layout
from fednorm.core.messages import Batches, Broadcast, ClientState, LayerStats, Reply, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.round import broadcast, client_round
from fednorm.core.task import Task, snapshot
from fednorm.core.types import ClientId, Tensors
from fednorm.data.federation import interleave_batches
from fednorm.engines import loop, trial
from fednorm.engines.base import EngineRun, Progress, RoundResult, train_clients
from fednorm.engines.merged_batch import is_random
from fednorm.errors import NonFiniteLossError
from fednorm.nn.stacked_model import count_activations, repeat_for_clients, widen

ClientResults = list[tuple[Reply, ClientState]]
# Measured on a CPU: nothing is gained if the layers put out more values in a client's step.
_SMALL = 2_000_000
_TOGETHER = 10_000_000  # values of all stacked clients
_LARGEST = 16  # stacked clients


@dataclass
class _MeanLosses:
    """The loss of a wide model: the sum over clients; each client's loss is recorded."""

    steps: list[Tensor] = field(default_factory=list)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        rows = output.reshape(y.numel(), -1)
        each = functional.cross_entropy(rows, y.flatten(), reduction="none").view(y.shape).mean(0)
        self.steps.append(each.detach())
        return each.sum()


class StackedClients:
    """A wide model for a fixed number of clients."""

    def __init__(self, task: Task, count: int) -> None:
        self.count, self.losses = count, _MeanLosses()
        model = widen(task.model, count)
        last = _is_channels_last(task.model)
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        model = model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        wide = find_layout(model, task.strategy.role)
        self.task = replace(task, model=model, layout=wide, loss=self.losses)
        self.initial = task.initial_client_state

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        group: Sequence[Batches],
    ) -> ClientResults:
        """Train clients whose batches and states have the same shapes."""
        kept = [client_states.get(own.client, ClientState()) for own in group]
        self.losses.steps.clear()
        # The clients' examples differ, so the number is left open (0), unless the algorithm counts
        # the batch, which is the same for all.
        side = Batches(
            group[0].client,
            _JoinedSteps([own.steps for own in group], self.memory_format),
            examples=0,
            all_data=_JoinedSteps([own.all_steps for own in group], self.memory_format),
            stacked=self.count,
        )
        reply, client_state = client_round(
            self.task, _make_stacked(received, self.count), self._join(kept), side, Replay({})
        )
        losses = torch.stack(self.losses.steps).mean(0).tolist()
        return [
            (self._reply(reply, i, own, losses[i]), self._split(client_state, i))
            for i, own in enumerate(group)
        ]

    def _join(self, kept: Sequence[ClientState]) -> ClientState:
        tensors = _join_states([state.tensors or self.initial.tensors for state in kept])
        return ClientState(tensors, _join_states([state.optimizer for state in kept]))

    def _split(self, client_state: ClientState, i: int) -> ClientState:
        # Copied: a view would hold the states of all stacked clients in memory.
        parts = (client_state.tensors, client_state.optimizer)
        return ClientState(*(snapshot(self._part(tensors, i)) for tensors in parts))

    def _reply(self, reply: Reply, i: int, own: Batches, loss: float) -> Reply:
        return replace(
            reply,
            client=own.client,
            examples=reply.examples or own.examples,
            update=self._part(reply.update, i),
            momentum=self._part(reply.momentum, i),
            stats={path: self._report(report, i) for path, report in reply.stats.items()},
            loss=loss,
        )

    def _part(self, tensors: Tensors, i: int) -> dict[str, Tensor]:
        return {
            name: t.view(self.count, -1, *t.shape[1:])[i] if t.dim() else t
            for name, t in tensors.items()
        }

    def _report(self, report: LayerStats, i: int) -> LayerStats:
        def cut(wide: Tensor) -> Tensor:
            return wide.view(*wide.shape[:-1], self.count, -1)[..., i, :]

        first, *more = (Moments(m.count, cut(m.mean), cut(m.var)) for m in report.calls)
        return replace(report, moments=first, more=tuple(more))


def _make_stacked(received: Broadcast, count: int) -> Broadcast:
    sent = received.state
    state = replace(
        sent,
        weights={name: repeat_for_clients(t, count) for name, t in sent.weights.items()},
        momentum={name: repeat_for_clients(t, count) for name, t in sent.momentum.items()},
        running={
            path: RunningStats(
                repeat_for_clients(r.mean, count, -1),
                repeat_for_clients(r.var, count, -1),
                r.num_batches,
            )
            for path, r in sent.running.items()
        },
    )
    return replace(received, state=state)


def _join_states(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    first = parts[0]
    return {
        name: torch.cat([part[name] for part in parts]) if first[name].dim() else first[name]
        for name in first
    }


@dataclass(frozen=True)
class _JoinedSteps:
    """The batches of several clients as one; labels are `[batch, clients]`."""

    parts: Sequence[Iterable[tuple[Tensor, Tensor]]]
    memory_format: torch.memory_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.parts)
        for x, y in interleave_batches(self.parts):
            wide = x.reshape(len(x) // count, -1, *x.shape[2:])
            last = self.memory_format if wide.dim() == 4 else torch.contiguous_format  # noqa: PLR2004
            yield wide.contiguous(memory_format=last), y.view(-1, count, *y.shape[1:])


def _is_channels_last(model: nn.Module) -> bool:
    """Return whether a model is in channels_last; ambiguous for a single channel."""
    return any(
        p.dim() == 4  # noqa: PLR2004
        and p.is_contiguous(memory_format=torch.channels_last)
        and not p.is_contiguous()
        for p in model.parameters()
    )


class StackedTrainer:
    """Trains the clients of a round in stacks of at most `size`."""

    def __init__(self, task: Task, size: int, byzantine: Collection[ClientId] = ()) -> None:
        self.task, self.size, self.byzantine = task, size, byzantine
        self.stacks: dict[int, StackedClients] = {}  # by their number of clients

    def group_clients(
        self, batches: Sequence[Batches], client_states: Mapping[ClientId, ClientState]
    ) -> list[list[Batches]]:
        """Return the stacks of a round: clients of equal shapes, in groups of about equal size."""
        alike: dict[object, list[Batches]] = {}
        for own in batches:
            shape = _describe_shape(self.task, own, client_states.get(own.client, ClientState()))
            alike.setdefault(shape, []).append(own)
        return [group for same in alike.values() for group in _cut(same, self.size)]

    def train_group(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        group: Sequence[Batches],
    ) -> ClientResults:
        """Train one stack of clients."""
        if len(group) > 1:
            if len(group) not in self.stacks:
                self.stacks[len(group)] = StackedClients(self.task, len(group))
            try:
                return self.stacks[len(group)].train(received, client_states, group)
            except NonFiniteLossError:
                pass  # trained one by one, the client with that loss is known
        results, _ = train_clients(self.task, received, client_states, group, self.byzantine)
        return results

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[ClientResults, dict[str, Tensor]]:
        """Train the clients of a round, stack after stack."""
        results = [
            result
            for group in self.group_clients(batches, client_states)
            for result in self.train_group(received, client_states, group)
        ]
        return results, {}


def _describe_shape(task: Task, own: Batches, client_state: ClientState) -> object:
    """Return what stacked clients must have in common."""
    tensors = [*client_state.tensors.items(), *client_state.optimizer.items()]
    counters = tuple((name, t.item()) for name, t in tensors if not t.dim())
    known = own.batch_sizes or own.client  # unknown sizes: grouped with no other client
    measured = own.examples if task.strategy.measures else None  # all their data pass together
    return known, measured, tuple(client_state.tensors), tuple(client_state.optimizer), counters


def _cut(same: list[Batches], size: int) -> Iterable[list[Batches]]:
    """Cut clients into non-empty groups of at most `size`."""
    parts = -(-len(same) // size)
    if parts > 1:  # an even number, for two processes, if there are enough clients
        parts = min(parts + parts % 2, len(same))
    return (same[i * len(same) // parts : (i + 1) * len(same) // parts] for i in range(parts))


def choose_size(task: Task, batches: Sequence[Batches]) -> int:
    """Return how many clients to stack: 1 for a model that is not small."""
    x, _ = next(iter(batches[0].steps))
    values = max(1, count_activations(task.model, x))
    return min(_LARGEST, _TOGETHER // values, len(batches)) if values <= _SMALL else 1


class StackedEngine:
    """A few clients at a time in one wide model."""

    name = "stacked"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why the clients cannot be stacked, or None."""
        return find_misfit(run.task, run.list_first_batches())

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        size = max(2, choose_size(run.task, run.list_first_batches()))
        trainer = StackedTrainer(run.task, size, run.faults.byzantine)
        return loop.rounds(
            run.task, run.clients, run.rounds, start, train=trainer.train, faults=run.faults
        )


def find_misfit(task: Task, batches: Sequence[Batches]) -> str | None:
    """Try two clients in one wide model; return how they differ from the loop, or None."""
    groups = StackedTrainer(task, len(batches)).group_clients(batches, {})
    alike = max(groups, key=len, default=[])
    if (
        task.strategy.exchanges
        or task.loss is not functional.cross_entropy
        or task.layout.buffers
        or is_random(task.model)
        or len(alike) < 2  # noqa: PLR2004
    ):
        return (
            "engine 'stacked' needs at least two clients a round with batches of equal sizes, a "
            "model of convolutions, linear and normalization layers without dropout, and a "
            "strategy without exchanges in mid-round"
        )
    # From the second step on the clients' weights differ.
    pair = [trial.take_first_steps(own, 2) for own in alike[:2]]
    compare = partial(_compare, pair)
    return trial.find_misfit("stacked", [own.client for own in pair], task, compare)


def _compare(pair: Sequence[Batches], task: Task) -> trial.Gap:
    received = broadcast(task, task.initial_state)
    together = StackedClients(task, len(pair)).train(received, {}, pair)
    alone = [client_round(task, received, ClientState(), own, Replay({})) for own in pair]
    return trial.find_gap(trial.collect_numbers(alone), trial.collect_numbers(together))
