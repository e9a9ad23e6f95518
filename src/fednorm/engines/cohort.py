"""Small models: several clients with weights of their own in one set of tensor operations.

For a small model the cost of a step is the cost of calling its operations, not of their arithmetic.
A cohort is a few clients side by side in a wide model (`nn/stacked_model.py`), trained by the very
`client_round` that trains one: the update of each is its part of the wide update. Equal to the
loop within rounding. Where it does not apply, `fits` says so, after trying.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednorm.core.exchange import Replay
from fednorm.core.layout import layout
from fednorm.core.messages import Batches, Broadcast, Memory, Reply, Report, Running
from fednorm.core.moments import Moments
from fednorm.core.round import NonFiniteLossError, broadcast, client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId, Tensors
from fednorm.data.federation import interleave_batches
from fednorm.engines import trial
from fednorm.engines.clients import train_client
from fednorm.engines.lockstep import is_random
from fednorm.nn.stacked_model import count_activations, repeat_for_clients, widen

Trained = list[tuple[Reply, Memory]]
# Measured on a CPU: above so many values that a client's step puts out, nothing is gained.
_SMALL = 2_000_000
_TOGETHER = 10_000_000  # values of a whole cohort
_LARGEST = 16  # clients of a cohort


@dataclass
class _Losses:
    """The loss of a wide model: the sum over clients, each of which is remembered."""

    clients: int
    steps: list[Tensor] = field(default_factory=list)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        rows = output.reshape(y.numel(), -1)
        each = functional.cross_entropy(rows, y.flatten(), reduction="none").view(y.shape).mean(0)
        self.steps.append(each.detach())
        return each.sum()


class Cohort:
    """A wide model for a fixed number of clients."""

    def __init__(self, task: Task, count: int) -> None:
        self.count, self.losses = count, _Losses(count)
        model = widen(task.model, count)
        last = _channels_last(task.model)
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        model = model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        wide = layout(model, task.strategy.role)
        self.task = replace(task, model=model, layout=wide, loss=self.losses)
        self.initial = task.initial_memory

    def train(
        self,
        received: Broadcast,
        memories: Mapping[ClientId, Memory],
        group: Sequence[Batches],
    ) -> Trained:
        """Train clients whose batches and memories have the same shapes."""
        kept = [memories.get(own.client, Memory()) for own in group]
        self.losses.steps.clear()
        # The clients' examples differ, so that the number stays open (0), unless the algorithm
        # counts the batch itself, which is the same for all.
        side = Batches(
            group[0].client,
            _Side([own.steps for own in group], self.memory_format),
            examples=0,
            everything=_Side([own.all_steps for own in group], self.memory_format),
        )
        reply, memory = client_round(
            self.task, _wide(received, self.count), self._memory(kept), side, Replay({})
        )
        losses = torch.stack(self.losses.steps).mean(0).tolist()
        return [
            (self._reply(reply, i, own, losses[i]), self._kept(memory, i))
            for i, own in enumerate(group)
        ]

    def _memory(self, kept: Sequence[Memory]) -> Memory:
        tensors = [memory.tensors or self.initial.tensors for memory in kept]
        return Memory(_joined(tensors), _joined([memory.optimizer for memory in kept]))

    def _kept(self, memory: Memory, i: int) -> Memory:
        # Copied: what one client keeps must not keep the rest of its cohort in memory.
        tensors, optimizer = self._part(memory.tensors, i), self._part(memory.optimizer, i)
        return Memory(
            {name: t.clone() for name, t in tensors.items()},
            {name: t.clone() for name, t in optimizer.items()},
        )

    def _reply(self, reply: Reply, i: int, own: Batches, loss: float) -> Reply:
        return replace(
            reply,
            client=own.client,
            examples=reply.examples or own.examples,
            update=self._part(reply.update, i),
            momentum=self._part(reply.momentum, i),
            stats={path: self._report(report, i) for path, report in reply.stats.items()},
            metrics={**reply.metrics, "loss": loss},
        )

    def _part(self, tensors: Tensors, i: int) -> dict[str, Tensor]:
        return {
            name: t.view(self.count, -1, *t.shape[1:])[i] if t.dim() else t
            for name, t in tensors.items()
        }

    def _report(self, report: Report, i: int) -> Report:
        first, *more = (self._moments(wide, i) for wide in report.calls)
        return replace(report, moments=first, more=tuple(more))

    def _moments(self, wide: Moments, i: int) -> Moments:
        mean, var = (
            t.view(*t.shape[:-1], self.count, -1)[..., i, :] for t in (wide.mean, wide.var)
        )
        return Moments(wide.count, mean, var)


def _wide(received: Broadcast, count: int) -> Broadcast:
    return replace(
        received,
        weights={name: repeat_for_clients(t, count) for name, t in received.weights.items()},
        momentum={name: repeat_for_clients(t, count) for name, t in received.momentum.items()},
        running={
            path: Running(
                repeat_for_clients(r.mean, count, -1),
                repeat_for_clients(r.var, count, -1),
                r.batches,
            )
            for path, r in received.running.items()
        },
    )


def _joined(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    first = parts[0]
    return {
        name: torch.cat([part[name] for part in parts]) if first[name].dim() else first[name]
        for name in first
    }


@dataclass(frozen=True)
class _Side:
    """The batches of several clients side by side; labels are `[batch, clients]`."""

    parts: Sequence[Iterable[tuple[Tensor, Tensor]]]
    memory_format: torch.memory_format

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.parts)
        for x, y in interleave_batches(self.parts):
            wide = x.reshape(len(x) // count, -1, *x.shape[2:])
            last = self.memory_format if wide.dim() == 4 else torch.contiguous_format  # noqa: PLR2004
            yield wide.contiguous(memory_format=last), y.view(-1, count, *y.shape[1:])


def _channels_last(model: nn.Module) -> bool:
    """Return whether a model's channels lie side by side; of one channel nobody can tell."""
    return any(
        p.dim() == 4  # noqa: PLR2004
        and p.is_contiguous(memory_format=torch.channels_last)
        and not p.is_contiguous()
        for p in model.parameters()
    )


class Cohorts:
    """Trains the clients of a round in cohorts of at most `size`."""

    def __init__(self, task: Task, size: int, byzantine: Collection[ClientId] = ()) -> None:
        self.task, self.size, self.byzantine = task, size, byzantine
        self.wide: dict[int, Cohort] = {}

    def groups(
        self, batches: Sequence[Batches], memories: Mapping[ClientId, Memory]
    ) -> list[list[Batches]]:
        """Return the cohorts of a round: clients that are alike, in groups of about one size."""
        alike: dict[object, list[Batches]] = {}
        for own in batches:
            shape = _shape(self.task, own, memories.get(own.client, Memory()))
            alike.setdefault(shape, []).append(own)
        return [group for same in alike.values() for group in _cut(same, self.size)]

    def train(
        self, received: Broadcast, memories: Mapping[ClientId, Memory], group: Sequence[Batches]
    ) -> Trained:
        """Train one cohort."""
        if len(group) > 1:
            if len(group) not in self.wide:
                self.wide[len(group)] = Cohort(self.task, len(group))
            try:
                return self.wide[len(group)].train(received, memories, group)
            except NonFiniteLossError:
                pass  # whose loss it is shows when they train one by one
        return [
            train_client(self.task, received, memory, own, Replay({}), self.byzantine)
            for own, memory in ((own, memories.get(own.client, Memory())) for own in group)
        ]

    def train_all(
        self,
        task: Task,
        received: Broadcast,
        memories: Mapping[ClientId, Memory],
        batches: Sequence[Batches],
    ) -> tuple[Trained, dict[str, Tensor]]:
        """Train the clients of a round, cohort after cohort."""
        del task
        results = [
            result
            for group in self.groups(batches, memories)
            for result in self.train(received, memories, group)
        ]
        return results, {}


def _shape(task: Task, own: Batches, memory: Memory) -> object:
    """Return what clients of one cohort must have in common."""
    tensors = [*memory.tensors.items(), *memory.optimizer.items()]
    counters = tuple((name, t.item()) for name, t in tensors if not t.dim())
    known = own.lengths or own.client  # nobody is like a client of whom nothing is known
    measured = own.examples if task.strategy.measures else None  # all data pass, side by side
    return known, measured, tuple(memory.tensors), tuple(memory.optimizer), counters


def _cut(same: list[Batches], size: int) -> Iterable[list[Batches]]:
    """Cut clients into groups of at most `size`, each of which has one at least."""
    parts = -(-len(same) // size)
    if parts > 1:  # so that two processes come out even, if there are clients enough
        parts = min(parts + parts % 2, len(same))
    return (same[i * len(same) // parts : (i + 1) * len(same) // parts] for i in range(parts))


def size(task: Task, batches: Sequence[Batches]) -> int:
    """Return how many clients a cohort should have: 1 for a model that is not small."""
    x, _ = next(iter(batches[0].steps))
    values = max(1, count_activations(task.model, x))
    return min(_LARGEST, _TOGETHER // values, len(batches)) if values <= _SMALL else 1


def fits(task: Task, batches: Sequence[Batches]) -> bool:
    """Return whether cohorts train these clients as the loop does; found out by trying two."""
    return not find_misfit(task, batches)


def find_misfit(task: Task, batches: Sequence[Batches]) -> str:
    """Return why cohorts do not train these clients as the loop does, or nothing if they do."""
    groups = Cohorts(task, len(batches)).groups(batches, {})
    alike = max(groups, key=len, default=[])
    if (
        task.strategy.exchanges
        or task.loss is not functional.cross_entropy
        or task.layout.buffers
        or is_random(task.model)
        or len(alike) < 2  # noqa: PLR2004
    ):
        return (
            "engine 'cohort' needs at least two clients a round whose batches are alike, a model "
            "of convolutions, linear and normalization layers without dropout, and a strategy "
            "without exchanges in mid-round"
        )
    # From the second step on the clients' weights differ.
    pair = [trial.first_steps(own, 2) for own in alike[:2]]
    compare = partial(_compare, pair)
    return trial.find_misfit("cohort", [own.client for own in pair], task, compare)


def _compare(pair: Sequence[Batches], task: Task) -> trial.Gap:
    received = broadcast(task, task.initial_state)
    together = Cohort(task, len(pair)).train(received, {}, pair)
    alone = [client_round(task, received, Memory(), own, Replay({})) for own in pair]
    return trial.find_gap(trial.numbers_of(alone), trial.numbers_of(together))
