"""Prepare a run: build it, and find before any training what would go wrong."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.messages import Batches, ClientState, LayerUse, Reply, upload_bytes
from fednorm.core.round import broadcast, client_round
from fednorm.core.task import export
from fednorm.core.types import ClientId
from fednorm.data import Dataset
from fednorm.data.sampling import Plan
from fednorm.engines import ENGINES, choose
from fednorm.engines.base import EngineRun
from fednorm.engines.client_state import count_bytes
from fednorm.engines.evaluation import adapt_statistics
from fednorm.engines.flower import require_flower
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment.build import PreparedRun, build_run
from fednorm.experiment.objective import ModelSource, check_loss, try_metrics
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.objects import OBJECT

# Of 1397 images, the one whose statistics are nearest to those of a batch of n was in it in 100 %
# of cases for n = 1, 29 % for n = 2, 11 % for n = 4 and 8 % for n = 8: benchmarks/privacy.py.
FEW_SAMPLES = 8

# What torch says of sizes that memory cannot hold; it has no type of error for them.
_TOO_LARGE = re.compile("allocate memory|Storage size calculation overflowed|Overflow when unpack")


def prepare(
    experiment: Experiment,
    entry: StrategySpec,
    seed: int,
    model: ModelSource | None = None,
    *,
    processes: int = 1,
) -> PreparedRun:
    """Build one run, try a step and choose its engine; raise ConfigError if it cannot work."""
    try:
        prepared = build_run(experiment, entry, seed, model)
        _check_batches(prepared)
        _check_objective(prepared)
        start = perf_counter()
        reply, kept = _try_one_step(prepared)
        step = perf_counter() - start
        setup = replace(prepared.setup, processes=processes, step_seconds=step)
        prepared = replace(prepared, setup=setup, kept=kept)
        if reply is not None:
            limited = _limit_claims(prepared, reply)
            prepared = replace(prepared, setup=limited, sent=upload_bytes(reply))
        if setup.engine == "flower":
            prepared = _connect_nodes(prepared, experiment, model)
        engine = choose(prepared.setup)
        # Diagnostics look at the reply of every client.
        return replace(prepared, engine=ENGINES["loop"] if prepared.experiment.diagnose else engine)
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _TOO_LARGE.search(str(error)):
            raise ConfigError(
                f"{entry.title}: data, model and one step do not fit into memory; use fewer "
                "samples, smaller batches or a smaller model."
            ) from error
        if isinstance(error, RuntimeError):
            raise
        raise ConfigError(f"{entry.title}: {error}") from error


def _check_objective(prepared: PreparedRun) -> None:
    """Try the user's loss and metrics on a few samples."""
    experiment, task = prepared.experiment, prepared.task
    if experiment.loss is not None:
        first = (prepared.clients.participants(1) or prepared.clients.all())[0]
        batch = next(iter(prepared.clients.batches(first, 1).steps))
        check_loss(task, experiment.loss.name, batch)
    if task.metrics.named:
        try_metrics(task, prepared.data)


def _connect_nodes(
    prepared: PreparedRun, experiment: Experiment, model: ModelSource | None
) -> PreparedRun:
    if model is not None:
        raise ValueError(
            "a model given as an object cannot be sent to nodes; "
            'name it as "package.module:function".'
        )
    for key in ("data", "loss"):
        if (chosen := getattr(experiment, key)) and chosen.name.startswith(OBJECT):
            raise ValueError(
                f"{key} given as an object cannot be sent to nodes; name a function as "
                '"package.module:function".'
            )
    with require_flower("engine 'flower'"):
        from fednorm.experiment.flower.nodes import make_nodes  # noqa: PLC0415 (an extra)
    nodes, faults = make_nodes(experiment, prepared), prepared.faults
    if faults.rollback:
        raise ValueError(
            "engine 'flower' cannot roll back, which needs the losses of clients after a round; "
            "choose another engine, or rollback = false with a robust aggregator."
        )
    # Nodes may have their data.
    limits = replace(faults.limits, remote=True, plan=experiment.plan)
    faults = replace(faults, limits=limits)
    setup = replace(prepared.setup, remote=nodes, faults=faults)
    return replace(prepared, remote=nodes, setup=setup)


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
                "batches, fewer clients, or a strategy that does not normalize by the batch, such "
                "as 'fbn' or 'gn'."
            )
        return  # the same holds for every client's single sample


def find_exposure(prepared: PreparedRun) -> str | None:
    """Return a warning if a client reports statistics of few samples, or None."""
    task, plan = prepared.task, prepared.experiment.plan
    noise = task.privacy.find_multiplier(statistics=True) if task.privacy else 0.0
    sharing = task.layout.sharing.keys() - task.frozen
    if prepared.entry.centralized or noise or task.secure or not sharing:
        return None
    whole = task.strategy.measures or task.strategy.calibration != "never"
    held = [len(prepared.federation.parts[client]) for client in prepared.federation.all()]
    counted = held if whole else [min(n, sum(plan.lengths(n))) for n in held]
    client = counted.index(min(counted))
    if counted[client] >= FEW_SAMPLES:
        return None
    return (
        f"client {client} shares statistics of {counted[client]} samples in a round: those of one "
        "sample are the sample itself, and of 1397 images the one nearest to the statistics of a "
        "batch was in it in 100 % of cases for 1 sample, 29 % for 2, 11 % for 4 and 8 % for 8; use "
        "larger batches, [privacy], or a strategy without statistics, such as 'gn'."
    )


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
    # Other faults show when a whole batch is tried.
    return layers[0] if layers else None


def _limit_claims(prepared: PreparedRun, reply: Reply) -> EngineRun:
    """Return the run with what a reply to one step tells of the library's own models.

    Another model may use a layer with some data more than with other data.
    """
    setup = prepared.setup
    if not setup.ours:
        return setup
    passes = 1
    if setup.task.strategy.measures:
        passes = len(setup.clients.all_batches(reply.client).batch_sizes) or 1
    before = setup.task.initial_state.running
    layers = {
        path: LayerUse(
            max(float(moments.count) for moments in report.calls) / report.samples,
            calls=-(-(report.num_batches - before[path].num_batches) // passes),
        )
        for path, report in reply.stats.items()
    }
    limits = replace(setup.faults.limits, layers=layers)
    return replace(setup, faults=replace(setup.faults, limits=limits))


def _try_one_step(prepared: PreparedRun) -> tuple[Reply | None, int]:
    """Train on one batch; return the client's reply, and how many bytes it would keep."""
    task = prepared.task
    first = (prepared.clients.participants(1) or prepared.clients.all())[0]
    batches = prepared.clients.batches(first, 1)
    one = replace(batches, steps=[next(iter(batches.steps))])
    try:
        reply, client_state = client_round(
            task, broadcast(task, task.initial_state), ClientState(), one
        )
        return reply, count_bytes(client_state)
    except NonFiniteLossError:
        return None, 0  # the run itself will say so, with its round and client
    except (RuntimeError, LookupError, AssertionError, AttributeError) as error:
        data = prepared.data
        what = "classes" if data.target in ("class", "tokens", "mask") else "targets each"
        raise ValueError(
            f"the model cannot be trained on samples of shape {data.shape} with {data.classes} "
            f"{what}: {error}{_explain_integers(data)}"
        ) from error


def _explain_integers(data: Dataset) -> str:
    if data.x.is_floating_point() or data.x.dtype == torch.uint8:
        return ""
    return f" (Samples of type {data.x.dtype} stay integers, as token ids; give floats otherwise.)"


@contextlib.contextmanager
def note_single_values(model: nn.Module) -> Iterator[list[str]]:
    """Note the BatchNorm layers that are given one value per channel while they train.

    >>> model = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    >>> with note_single_values(model) as noted:
    ...     _ = model(nn.Parameter().new_ones(1, 3, 2))
    >>> noted
    []
    """
    noted: list[str] = []

    paths = {module: path for path, module in model.named_modules()}

    def note(layer: nn.Module, given: tuple[Tensor]) -> None:
        if layer.training and given[0].numel() == given[0].shape[1]:
            noted.append(paths[layer])

    layers = [module for module in paths if isinstance(module, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()
