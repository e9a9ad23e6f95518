"""One-step rounds: one forward and backward pass for all clients.

When every client takes one step from the same weights, and the server takes a weighted mean, the
clients can share one batch: the gradient of its mean loss is the mean of their gradients, and
pooled moments are the moments of the whole. Only a layer that normalizes by each client's own
batch must know where one client ends and the next begins. A strategy's `merge` then gets one report
for all clients: their pooled moments.

Equal to the loop within rounding. Whether a model treats each sample independently cannot be seen;
`find_misfit` tries it. `MergedClients` also make the reference run on one machine.

Dropout draws its masks from a generator that is seeded for each client. On a merged batch one
machine would draw other masks. Within `share_masks` every random operation is made part by part:
the samples of a client get the numbers that this client's generator draws for them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from fednorm.core.aggregation import combine_tensors, weighted_mean
from fednorm.core.messages import Batches, ClientState
from fednorm.core.round import broadcast, client_round
from fednorm.core.targets import SAMPLE_MEANS
from fednorm.core.task import Task, isolated_rng
from fednorm.core.types import ClientId
from fednorm.data.federation import interleave_batches
from fednorm.engines import trial
from fednorm.engines.base import ClientSource, EngineRun, Progress, RoundResult
from fednorm.engines.loop import rounds as rounds_in_turn
from fednorm.errors import NonFiniteLossError


@dataclass(frozen=True, slots=True)
class MergedClients(ClientSource):
    """All clients of a federation as one machine."""

    clients: ClientSource

    def all(self) -> list[ClientId]:
        """Return the only client."""
        return [0]

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return the merged batches of the clients that would take part in the round."""
        return merge_batches(
            [self.clients.batches(c, round_) for c in self.clients.participants(round_)]
        )

    def all_batches(self, client: ClientId) -> Batches:  # noqa: ARG002 (protocol)
        """Return all data once."""
        return merge_batches([self.clients.all_batches(c) for c in self.clients.all()])


@dataclass(frozen=True, slots=True)
class MergedSteps:
    """Step s holds the samples of step s of every client that has one."""

    parts: Sequence[Iterable[tuple[Tensor, Tensor]]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batches in zip_longest(*self.parts):
            present = [batch for batch in batches if batch is not None]
            yield torch.cat([x for x, _ in present]), torch.cat([y for _, y in present])


def merge_batches(parts: Sequence[Batches]) -> Batches:
    """Return the batches of several clients as those of one."""
    return Batches(
        0,
        MergedSteps([part.steps for part in parts]),
        sum(part.examples for part in parts),
        seed=parts[0].seed,
        all_data=MergedSteps([part.all_steps for part in parts]),
    )


_RANDOM = (_DropoutNd, nn.RReLU)


class MergedEngine:
    """One pass for the batches of all clients."""

    name = "merged"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why the clients' batches cannot be merged, or None."""
        missing = [need for need, met in _list_needs(run) if not met]
        if missing:
            return f"engine 'merged' needs {', '.join(missing)}"
        return None if run.ours else find_misfit(run.task, run.clients)

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        return rounds(run.task, run.clients, run.rounds, start)


def _list_needs(run: EngineRun) -> Iterator[tuple[str, bool]]:
    """Yield what merged batches need, and whether `run` meets it."""
    task = run.task
    aggregators = (task.aggregator, task.statistics_aggregator)
    exact = task.strategy.mergeable_batches and _statistics_fit(task)
    yield "a strategy that is exact on the union of the clients' batches", exact
    yield "one step per round (dsgd)", task.algorithm.single_step
    yield "the mean as aggregator", all(rule.uses_weights for rule in aggregators)
    yield "no privacy, which clips each client's update", task.privacy is None
    yield "clients that all are honest and answer", run.faults.faultless
    yield "secure = false, as each client encodes its reply", not task.secure
    yield "no personal tensors", not task.layout.personal
    # The mean of clipped gradients is not the clipped mean.
    yield "no clipped gradients", not (task.clips or task.algorithm.clips_gradients)
    # Each client would change them separately.
    yield "no buffers outside normalization layers", not task.layout.buffers
    yield "no dropout layers", not is_random(task.model)  # each client has its draws
    # A mean over samples; that of segmentation is over pixels that have a label.
    mean = any(task.loss is known for known in SAMPLE_MEANS) and not run.segmentation
    yield "a loss of fednorm's own, with all of each sample's targets", mean
    # The mean of the clients' momenta follows the mean gradient only if none is ever absent.
    present = run.participation >= 1 or not task.algorithm.keeps_state
    yield "all clients in every round if they have momentum", present


def find_misfit(task: Task, clients: ClientSource) -> str | None:
    """Try two clients in one batch; return how they differ from the loop, or None.

    Batches of one size are interleaved and others are not, so both cases are tried if there are
    both.
    """
    alike: dict[int, list[ClientId]] = {}
    for client in clients.all():
        length = _with_batch_size(clients.batches(client, 1)).batch_sizes[0]
        alike.setdefault(length, []).append(client)
    of_one_size = next((group[:2] for group in alike.values() if len(group) > 1), [])
    of_two_sizes = [group[0] for group in alike.values()][:2]
    for pair in (pair for pair in (of_one_size, of_two_sizes) if len(pair) > 1):
        compare = partial(_compare, trial.FewClients(clients, pair))
        if found := trial.find_misfit("merged", pair, task, compare):
            return found
    return None


def _compare(clients: ClientSource, task: Task) -> trial.Gap:
    alone, together = next(rounds_in_turn(task, clients, 1)), next(rounds(task, clients, 1))
    return trial.find_gap(_collect_numbers(alone), _collect_numbers(together))


def _collect_numbers(result: RoundResult) -> dict[str, Tensor]:
    """Return a round's outcome at the server, by a description."""
    updates, examples = [r.update for r in result.replies], [r.examples for r in result.replies]
    update, running = combine_tensors(updates, examples, weighted_mean), result.state.running
    return {
        **{f"the mean update of {name!r}": t for name, t in update.items()},
        **{f"the shared mean of {path!r}": r.mean for path, r in running.items()},
        **{f"the shared variance of {path!r}": r.var for path, r in running.items()},
        "the mean loss": torch.tensor(result.train_loss, dtype=torch.float64),
    }


def is_random(model: nn.Module) -> bool:
    """Return whether a model draws random numbers when it trains."""
    return any(isinstance(module, _RANDOM) for module in model.modules())


def _statistics_fit(task: Task) -> bool:
    """Return whether moments of the whole are enough; an average needs those of each client."""
    if task.strategy.statistics == "pool" or not task.layout.sharing:
        return True
    rule = task.strategy.rule(broadcast(task, task.initial_state))
    return rule.normalize_with == "batch" and rule.tracks


class InterleavedClients(MergedClients):
    """All clients of a round as one; the batch knows which samples are whose."""

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return the batches of all clients that take part as one."""
        drawn = [self.clients.batches(c, round_) for c in self.clients.participants(round_)]
        parts = [_with_batch_size(part) for part in drawn]
        steps, sizes = [part.steps for part in parts], tuple(part.batch_sizes[0] for part in parts)
        if len(set(sizes)) == 1:
            step = next(interleave_batches(steps))
        else:
            only = [next(iter(own)) for own in steps]
            step = torch.cat([x for x, _ in only]), torch.cat([y for _, y in only])
        return replace(
            merge_batches(parts), steps=[step], client_sizes=sizes if len(parts) > 1 else ()
        )


def _with_batch_size(part: Batches) -> Batches:
    """Return a client's batches with their sizes; unknown ones are read off the first batch."""
    if part.batch_sizes:
        return part
    first = next(iter(part.steps))
    return replace(part, steps=[first], batch_sizes=(len(first[1]),))


def rounds(
    task: Task, clients: ClientSource, count: int, start: Progress | None = None
) -> Iterator[RoundResult]:
    """Run federated rounds with merged batches, up to round `count`."""
    state = start.state if start else task.initial_state
    try:
        for result in rounds_in_turn(task, InterleavedClients(clients), count, start):
            state = result.state
            yield result
    except NonFiniteLossError:
        received = broadcast(task, state)
        for client in clients.participants(received.round):  # to name the client
            client_round(task, received, ClientState(), clients.batches(client, received.round))
        raise


class UnmatchedDrawError(RuntimeError):
    """A random operation that does not draw for each sample independently."""


def share_masks(parts: Sequence[Batches], model: nn.Module) -> TorchDispatchMode:
    """Let `model`, on the merged first batches of `parts`, draw what each part draws alone.

    Raises UnmatchedDrawError, within the block, where random numbers do not belong to samples:
    their tensor must hold the samples in its first axis, each in as many rows as the others.
    """
    sizes = [len(next(iter(part.steps))[1]) for part in parts]
    return _PartByPart([_Stream(part.seed, model) for part in parts], sizes)


class _Stream:
    """The generators of one client, which continue from where they stopped."""

    def __init__(self, seed: int, model: nn.Module) -> None:
        device = next(model.parameters()).device
        self.model, self.devices = model, [] if device.type == "cpu" else [device]
        with isolated_rng(seed, model):
            self.states = self._read()

    def _read(self) -> list[Tensor]:
        others = [torch.get_device_module(d).get_rng_state(d) for d in self.devices]
        return [torch.get_rng_state(), *others]

    @contextmanager
    def resume(self) -> Iterator[None]:
        with isolated_rng(0, self.model):  # the seed is replaced by the state
            torch.set_rng_state(self.states[0])
            for device, state in zip(self.devices, self.states[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            yield
            self.states = self._read()


class _PartByPart(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Cuts the tensors of random operations into the parts of a merged batch."""

    def __init__(self, streams: Sequence[_Stream], sizes: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self.streams, self.sizes = streams, sizes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler at the first use: two seconds."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in op.tags or given.get("generator") is not None:
            return op(*args, **given)
        rows = self._rows(op, args)
        own: list[Any] = []
        found: list[Any] = []
        for number, stream in enumerate(self.streams):
            own = [arg.split(rows)[number] if _has(arg, sum(rows)) else arg for arg in args]
            with stream.resume():
                found.append(op(*own, **given))
        if found[-1] is own[0]:  # the parts were changed in place
            return args[0]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(same) for same in zip(*found, strict=True))
        return torch.cat(found)

    def _rows(self, op: Any, args: Sequence[Any]) -> list[int]:
        """Return how many rows of the first tensor belong to each part."""
        total = sum(self.sizes)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        length = 0 if first is None or not first.dim() else len(first)
        if not length or length % total:
            shape = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)}"
            raise UnmatchedDrawError(
                f"random numbers of a model must be drawn for each sample, but {op} draws for "
                f"{shape} in a batch of {total} samples."
            )
        return [size * (length // total) for size in self.sizes]


def _has(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
