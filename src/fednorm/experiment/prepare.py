"""Builds what a run needs, and finds what would go wrong before any training."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from fednorm.attacks import DataInfo
from fednorm.core.messages import Batches, ClientState, upload_bytes
from fednorm.core.round import broadcast, client_round
from fednorm.core.task import Task, export
from fednorm.core.types import ClientId
from fednorm.data import Dataset, load_dataset
from fednorm.data.federation import Federation, build_federation
from fednorm.data.sampling import Plan
from fednorm.engines import loop, processes
from fednorm.engines.base import NO_FAULTS, ClientSource, Faults, PoisonedClients
from fednorm.engines.client_state import count_bytes
from fednorm.engines.evaluation import is_personal
from fednorm.engines.evaluation_statistics import adapt_statistics
from fednorm.engines.loop import RoundResult, Start
from fednorm.engines.merged_batch import MergedClients
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment import engine, threat_model
from fednorm.experiment.config import Experiment
from fednorm.experiment.specs import Spec, StrategySpec
from fednorm.models import MODELS, create_model
from fednorm.nn.copies import copy_model
from fednorm.nn.forward_probe import note_single_values
from fednorm.system import has_bfloat16

if TYPE_CHECKING:
    from fednorm.experiment.flower.nodes import Remote

log = logging.getLogger("fednorm")

_SAFE_CHANNELS = 16

ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class PreparedRun:
    """One run, ready to start."""

    experiment: Experiment
    entry: StrategySpec
    seed: int
    task: Task
    clients: ClientSource  # the federation, or all of it as one machine
    federation: Federation
    data: Dataset
    ours: bool  # whether the model is one of the library's own
    conditions: Faults = NO_FAULTS
    world: DataInfo | None = None  # what an attack on data knows of them
    engine: str = "loop"
    kept: int = 0  # bytes that a client keeps between its rounds
    sent: int = 0  # bytes that a client sends in a round
    step: float = 0.0  # seconds that a client's step takes
    processes: int = 1  # that may be used to train clients side by side
    remote: "Remote | None" = None  # clients on Flower's nodes

    def count_workers(self, free: int) -> int:
        """Return how many of the free processes the run would use for its clients."""
        if self.entry.centralized or self.remote or not processes.fits(self.task):
            return 1
        return engine.count_processes(
            self.engine, self.experiment, self.federation, free=free, step=self.step
        )

    def bytes_per_round(self) -> int:
        """Return how many bytes the clients of a round send, and keep after it."""
        if self.entry.centralized or self.engine == "merged":  # one client
            return self.sent + self.kept
        return len(self.clients.participants(1)) * (self.sent + self.kept)

    def rounds(self, start: Start | None = None) -> Iterator[RoundResult]:
        """Run the rounds, or those that are left."""
        task, experiment = self.task, self.experiment
        if self.entry.centralized:
            return loop.rounds(task, self.clients, experiment.rounds, start)
        if self.remote:
            return self.remote.rounds(task, self.clients, experiment.rounds, start, self.conditions)
        run = engine.ready(
            self.engine,
            experiment,
            task,
            self.clients,
            processes=self.count_workers(self.processes),
            conditions=self.conditions,
        )
        return run(start)


def prepare(
    experiment: Experiment,
    entry: StrategySpec,
    seed: int,
    model: ModelSource | None = None,
    *,
    processes: int = 1,
) -> PreparedRun:
    """Build data, clients, model and task of one run; raise ConfigError if it cannot work."""
    try:
        prepared = replace(build_run(experiment, entry, seed, model), processes=processes)
        _check_batches(prepared)
        start = perf_counter()
        sent, kept = _try_one_step(prepared)
        step = perf_counter() - start
        return replace(prepared, sent=sent, kept=kept, step=step, engine=_choose_engine(prepared))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{entry.title}: {error}") from error


def _choose_engine(prepared: PreparedRun) -> str:
    if prepared.entry.centralized:
        return "loop"
    return engine.choose(
        prepared.experiment,
        prepared.task,
        prepared.federation,
        ours=prepared.ours,
        conditions=prepared.conditions,
    )


def load_data(experiment: Experiment, seed: int) -> Dataset:
    """Return the data of an experiment, fetched if it is missing; the last one is remembered."""
    return _load_data(experiment.data.model_dump_json(), seed)


@lru_cache(maxsize=1)
def _load_data(entry: str, seed: int) -> Dataset:
    chosen = Spec.model_validate_json(entry)
    return load_dataset(chosen.name, seed, **chosen.fields)


def clear_data_cache() -> None:
    """Forget the data that were loaded last."""
    _load_data.cache_clear()


def build_run(
    experiment: Experiment, entry: StrategySpec, seed: int, model: ModelSource | None = None
) -> PreparedRun:
    """Build one run without trying it."""
    whole, experiment = experiment, experiment.for_entry(entry)
    dtype = getattr(torch, experiment.dtype)
    device = _find_device(experiment.device)
    data = load_data(experiment, seed).to(device, dtype)
    ours = model is None and experiment.model.name in MODELS
    network = _make_model(experiment, data, seed, model).to(device, dtype)
    if ours and data.has_images and channels_may_come_last(network):
        # A user's model may flatten with `view`, which this arrangement forbids.
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        data = replace(data, transform=replace(data.transform, channels_last=True))
    clients = build_federation(
        data,
        experiment.partition_rule,
        experiment.plan,
        clients=experiment.clients,
        seed=seed,
        participation=experiment.participation,
        unseen=experiment.unseen_clients,
    )
    strategy = experiment.make_strategy(entry)
    aggregate, aggregate_statistics = experiment.aggregators
    if experiment.precision == "bf16" and device.type == "cpu" and not has_bfloat16():
        _warn_of_slow_bfloat16()
    task = Task.build(
        network,
        strategy,
        experiment.make_algorithm(strategy),
        rounds=experiment.rounds,
        aggregator=aggregate,
        statistics_aggregator=aggregate_statistics,
        precision=experiment.precision,
    )
    if entry.centralized and is_personal(task):
        raise ValueError(
            f"{entry.strategy!r} keeps tensors on its clients, and a centralized run has none; "
            "choose a strategy that shares everything."
        )
    conditions = threat_model.make_faults(experiment, task, clients, seed)
    world = threat_model.make_world(conditions, data)
    source: ClientSource = MergedClients(clients) if entry.centralized else clients
    if conditions.adversary and world:
        source = PoisonedClients(clients, conditions.adversary, world)
    made = PreparedRun(
        experiment, entry, seed, task, source, clients, data, ours, conditions, world
    )
    if experiment.engine != "flower" or entry.centralized:
        return made
    if model is not None:
        raise ValueError(
            "a model given as an object cannot be sent to nodes; "
            'name it as "package.module:function".'
        )
    return replace(made, remote=_make_remote(whole, entry, seed, task))


@lru_cache(maxsize=1)
def _warn_of_slow_bfloat16() -> None:  # once, not for every run
    log.warning("this processor has no products in bfloat16; precision 'full' will be faster.")


def _make_remote(experiment: Experiment, entry: StrategySpec, seed: int, task: Task) -> "Remote":
    try:
        from fednorm.experiment.flower.nodes import make_remote  # noqa: PLC0415 (Flower is an extra)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ValueError(
            "engine 'flower' needs Flower, which is not installed; pip install \"fednorm[flower]\"."
        ) from error
    return make_remote(experiment, entry, seed, task)


def channels_may_come_last(network: nn.Module) -> bool:
    """Return False for models with which torch's CPU kernels corrupt memory in that arrangement.

    The backward pass of a strided 1x1 convolution of few channels (seen below 8, with torch 2.13
    and oneDNN) writes beyond its buffers.
    """
    return not any(
        max(conv.kernel_size) == 1 and max(conv.stride) > 1 and conv.in_channels < _SAFE_CHANNELS
        for conv in network.modules()
        if isinstance(conv, nn.Conv2d)
    )


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def _make_model(
    experiment: Experiment, data: Dataset, seed: int, model: ModelSource | None
) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy_model(model)  # `.to` changes a module in place
    if model is not None:
        return model()
    entry = experiment.model
    return create_model(entry.name, data.shape, data.classes, seed, **entry.fields)


def _check_batches(prepared: PreparedRun) -> None:
    experiment = prepared.experiment
    merged = prepared.entry.centralized and len(prepared.federation.participants(1)) > 1
    trains = prepared.task.strategy.needs_batch_statistics and not merged
    if not trains and not experiment.adapt_statistics:
        return
    plan = experiment.plan if trains else Plan(experiment.batch_size, steps=None, epochs=1)
    doing = "train on" if trains else "adapt to"
    for client, part in enumerate(prepared.federation.parts):
        if min(plan.lengths(len(part))) > 1:
            continue
        if layer := _find_layer_without_variance(prepared, client, trains=trains):
            raise ValueError(
                f"client {client} ({len(part)} samples) would {doing} a batch of 1 sample, of "
                f"which layer {layer!r} gets one value per channel, without variance; use larger "
                "batches, fewer clients, or a strategy that does not normalise by the batch, such "
                "as 'fbn' or 'gn'."
            )
        return  # whose sample it is makes no difference


def _find_layer_without_variance(
    prepared: PreparedRun, client: ClientId, *, trains: bool
) -> str | None:
    """Return a BatchNorm layer that gets one value per channel of one sample, found by trying."""
    task, state = prepared.task, prepared.task.initial_state
    x, y = next(iter(prepared.federation.all_batches(client).steps))
    one = Batches(client, [(x[:1], y[:1])], examples=1)
    with note_single_values(task.model) as layers, contextlib.suppress(Exception):
        if trains:
            client_round(task, broadcast(task, state), ClientState(), one)
        else:
            export(task, state)
            adapt_statistics(task, one, prepared.experiment.adapt_statistics)
    # What else goes wrong shows where a whole batch is tried.
    return layers[0] if layers else None


def _try_one_step(prepared: PreparedRun) -> tuple[int, int]:
    """Train on one batch, so that misfits show before the first round.

    Return how many bytes the client would send and keep.
    """
    task = prepared.task
    first = prepared.clients.participants(1)[0]
    batches = prepared.clients.batches(first, 1)
    one = replace(batches, steps=[next(iter(batches.steps))])
    try:
        reply, client_state = client_round(
            task, broadcast(task, task.initial_state), ClientState(), one
        )
        return upload_bytes(reply), count_bytes(client_state)
    except NonFiniteLossError:
        return 0, 0  # the run itself will say so, with its round and client
    except (RuntimeError, LookupError, AssertionError, AttributeError) as error:
        shape = tuple(prepared.data.shape)
        raise ValueError(
            f"the model cannot be trained on samples of shape {shape} with "
            f"{prepared.data.classes} classes: {error}"
        ) from error
