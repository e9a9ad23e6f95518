"""Measure how far clients are apart in each layer, before any training.

As in `naive`, the batches of every client pass through the model at its initial weights, and each
batch is normalised by itself. The moments of the layers' inputs are pooled by the law of total
variance. The same measurement with samples dealt to clients at random shows how much of a distance
is due to small batches.

The effect on gradients: the mean gradient of a strategy is compared with that of one machine on the
same batches. The machine has ordinary BatchNorm in the network as the strategy converts it: where
convolutions are standardised, its are too. The gradient is the update of `dsgd` without momentum,
at the initial weights; the deviation is ‖mean over clients - machine‖ / ‖machine‖, averaged over
batches. Dropout layers are off; other random draws of a model are the same on both sides.

Strategies that share statistics are measured twice: with the statistics of the first round, and
with those to which they converge while the weights stay fixed.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from fednorm.algorithms.dsgd import DSGD
from fednorm.core.aggregation import weighted_mean
from fednorm.core.layer import NormRule, RoundContext
from fednorm.core.messages import ClientState, LayerStats, RunningStats
from fednorm.core.moments import Moments, pool
from fednorm.core.round import broadcast, client_calibration
from fednorm.core.task import Task, isolated_rng, load_state, start_training
from fednorm.core.types import Tensors
from fednorm.data import Dataset
from fednorm.doctor.costs import (
    REFUSALS,
    ExaminedModel,
    FixedBatches,
    build_task,
    deal_again,
    describe_error,
    draw,
)
from fednorm.doctor.findings import ClientShift, Distance, Gradient, Statistics
from fednorm.engines.base import ClientSource
from fednorm.engines.loop import rounds
from fednorm.engines.merged_batch import MergedClients, share_masks
from fednorm.experiment.build import build_clients
from fednorm.nn import rules
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.dual_norm import BackwardMeans
from fednorm.strategies.naive import Naive

LEAST = 2  # clients needed for a distance
# A channel is constant up to rounding if its standard deviation is below this share of its mean.
ROUNDING = 1e-6
# The measured strategies, all with a global model, and the sources of their statistics.
MEASURED: Mapping[str, tuple[Statistics, ...]] = {
    "naive": ("batch",),
    "fbn": ("start", "calibrated"),
    "dualbn": ("start", "calibrated"),
    "fedtan": ("exchanged",),
}
GRADIENT = DSGD(lr=1.0, warmup=0)  # the update is the gradient itself


def measure_clients(
    examined: ExaminedModel, data: Dataset, batches: int, *, samples: int = 1
) -> ClientShift:
    """Measure how far the clients are apart, and the effect on gradients.

    Clients with a batch of fewer than `samples` are left out.
    """
    experiment = examined.experiment
    everyone = build_clients(experiment, data, experiment.seeds[0])
    smallest = {c: min(everyone.plan.lengths(len(everyone.parts[c]))) for c in everyone.all()}
    left_out = tuple(client for client, size in smallest.items() if size < samples)
    clients = ClientShift(
        data=data.name,
        partition=experiment.partition,
        clients=len(smallest),
        batches=batches,
        left_out=left_out,
        unmeasured=None,
    )
    if (enough := len(smallest) - len(left_out)) < LEAST:
        why = (
            f"{enough} clients have batches of at least {samples} samples, and {LEAST} are needed."
        )
        return replace(clients, unmeasured=why)
    drawn = draw(everyone, batches).steps
    kept = FixedBatches({client: own for client, own in drawn.items() if client not in left_out})
    try:
        return _measure(examined, clients, kept)
    except REFUSALS as error:
        return replace(clients, unmeasured=describe_error(error))


def _measure(examined: ExaminedModel, clients: ClientShift, drawn: FixedBatches) -> ClientShift:
    seed = examined.experiment.seeds[0]
    quiet = replace(examined, model=disable_dropout(examined.model))
    alike = deal_again(drawn, seed)
    with isolated_rng(seed):  # for randomness outside dropout layers
        task = Task.build(quiet.model, Naive(), GRADIENT)
        if not task.layout.norms:
            why = f"{type(examined.model).__name__} has no BatchNorm layers, which are measured."
            return replace(clients, unmeasured=why)
        return replace(
            clients,
            layers=measure_distances(task, drawn, alike),
            gradients=measure_gradients(quiet, drawn, alike),
        )


def measure_distances(
    task: Task, clients: FixedBatches, alike: FixedBatches
) -> tuple[Distance, ...]:
    """Return the distances in every layer that tracks statistics and is reached."""
    chance = {
        path: measure_bias(moments) for path, moments in _collect_moments(task, alike).items()
    }
    return tuple(
        _measure_distance(path, moments, chance[path])
        for path, moments in _collect_moments(task, clients).items()
    )


def _collect_moments(task: Task, clients: FixedBatches) -> dict[str, list[Moments]]:
    """Return the moments of each client's inputs, by layer."""
    received = broadcast(task, task.initial_state)
    seen = [
        client_calibration(
            task, received, ClientState(), clients.all_batches(c), rules.calibrate_batch
        ).stats
        for c in clients.all()
    ]
    return {path: [_to_double(stats[path].moments) for stats in seen] for path in seen[0]}


def _to_double(moments: Moments) -> Moments:
    return Moments(moments.count, moments.mean.cpu().double(), moments.var.cpu().double())


def _measure_distance(path: str, moments: Sequence[Moments], chance: float | None) -> Distance:
    pooled = pool(moments)
    varying = _find_varying(pooled)
    constant = int((~varying).sum())
    bias = measure_bias(moments)
    if bias is None:
        return Distance(path, None, None, None, None, None, None, None, constant)
    means, variances = (torch.stack([getattr(m, k) for m in moments]) for k in ("mean", "var"))
    shift = ((means - pooled.mean).abs() / pooled.var.sqrt())[:, varying]
    ratio = (variances / pooled.var)[:, varying].mean(1)
    return Distance(
        path=path,
        shift=float(shift.mean()),
        var_ratio=float(ratio.mean()),
        var_ratio_min=float(ratio.min()),
        var_ratio_max=float(ratio.max()),
        bias=bias,
        bias_alike=chance,
        excess=None if chance is None else bias - chance,
        constant_channels=constant,
    )


def measure_bias(moments: Sequence[Moments]) -> float | None:
    """Return the share of the variance that an average of the clients' variances lacks.

    >>> means, var = torch.tensor([[0.0], [2.0]]), torch.tensor([3.0])
    >>> measure_bias([Moments(1.0, mean, var) for mean in means])
    0.25
    """
    pooled = pool(moments)
    weights = torch.tensor([m.count for m in moments], dtype=pooled.var.dtype)
    within = torch.stack([m.var for m in moments]).T @ (weights / weights.sum())
    varying = _find_varying(pooled)
    if not varying.any():
        return None
    return float((1 - within / pooled.var)[varying].mean())


def _find_varying(pooled: Moments) -> Tensor:
    return pooled.var > (ROUNDING * pooled.mean) ** 2


def disable_dropout(model: nn.Module) -> nn.Module:
    """Return a copy whose dropout layers drop nothing, since masks would blur small batches."""
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return quiet


def measure_gradients(
    examined: ExaminedModel, clients: FixedBatches, alike: FixedBatches
) -> tuple[Gradient, ...]:
    """Return the deviation of each measured strategy that is registered."""
    names = [entry.name for entry in examined.experiment.strategies if entry.name in MEASURED]
    return tuple(g for name in names for g in _measure_strategy(examined, name, clients, alike))


def _measure_strategy(
    examined: ExaminedModel, name: str, clients: FixedBatches, alike: FixedBatches
) -> list[Gradient]:
    found: list[Gradient] = []
    try:
        task = replace(build_task(examined, name), algorithm=GRADIENT)
        reference = Task.build(task.strategy.convert(examined.model).model, Naive(), GRADIENT)
        for statistics in MEASURED[name]:
            started = converge_statistics(task, clients) if statistics == "calibrated" else task
            measured = measure_deviation(started, reference, clients)
            chance = measure_deviation(task, reference, alike) if statistics == "batch" else None
            excess = None if measured is None or chance is None else measured - chance
            found.append(Gradient(name, statistics, measured, chance, excess))
    except REFUSALS as error:
        missing = MEASURED[name][len(found) :]
        found += [Gradient(name, s, refused=describe_error(error)) for s in missing]
    return found


def measure_deviation(task: Task, reference: Task, clients: FixedBatches) -> float | None:
    """Return the relative distance of the mean gradients, averaged over the batches."""
    relative = []
    for step in clients.split_steps():
        with share_masks([step.batches(c, 1) for c in step.all()], reference.model):
            central = compute_gradient(reference, MergedClients(step))
        mean = compute_gradient(task, step)
        size = _measure_norm(central)
        if not size:
            return None
        relative.append(_measure_norm({name: mean[name] - g for name, g in central.items()}) / size)
    return fmean(relative)


def compute_gradient(task: Task, clients: ClientSource) -> dict[str, Tensor]:
    """Return the mean gradient of a round from the task's initial state."""
    (result,) = rounds(task, clients, 1)
    weights = torch.tensor([reply.examples for reply in result.replies], dtype=torch.float64)
    updates = [reply.update for reply in result.replies]
    return {
        name: weighted_mean(torch.stack([update[name] for update in updates]).double(), weights)
        for name in updates[0]
    }


def _measure_norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))


def converge_statistics(task: Task, clients: FixedBatches) -> Task:
    """Return the task with the shared statistics that many rounds at fixed weights would give.

    One machine with all clients' batches measures them: those of the forward pass, and the means
    of the backward pass if the strategy shares these, too. They are
    measured together, because the input of a layer depends on the layers before it.
    """
    state = task.initial_state
    load_state(task, state, ClientState())
    start_training(task)
    rule = NormRule("batch", tracks=False, reports="moments", normalize=record_both_passes)
    reports: dict[str, list[LayerStats]] = {path: [] for path in task.layout.sharing}
    for x, y in MergedClients(clients).batches(0, 1).steps:
        for path, layer in task.layout.norms.items():
            layer.start_round(rule, RoundContext(), path)
        loss = task.loss(task.model(x), y)
        torch.autograd.grad(loss, list(task.layout.shared.values()), allow_unused=True)
        for path, layer in task.layout.sharing.items():
            if (report := layer.report("pool")) is not None:
                reports[path].append(report)
    running = {
        path: _pool_reports(before, reports[path]) if reports[path] else before
        for path, before in state.running.items()
    }
    return replace(task, initial_state=replace(state, running=running))


def record_both_passes(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record the moments, forward and backward."""
    layer.record_batch(x)
    y = layer.normalize_by_batch(x)
    means = getattr(layer, "backward_means", None)
    if isinstance(means, BackwardMeans) and y.requires_grad:
        normalized = functional.batch_norm(x.detach(), None, None, training=True, eps=layer.eps)

        def note(gradient: Tensor) -> None:
            means.record_backward(gradient, normalized)

        y.register_hook(note)  # type: ignore[no-untyped-call]  # torch's own
    return y


def _pool_reports(before: RunningStats, reports: Sequence[LayerStats]) -> RunningStats:
    """Return the statistics of all batches together."""
    moments = [report.moments for report in reports]
    if before.var.numel():
        pooled = pool(moments)
        return replace(before, mean=pooled.mean, var=pooled.unbiased_var)
    # Backward means have no variance to pool.
    counts = torch.tensor([m.count for m in moments], dtype=torch.float64)
    return replace(before, mean=weighted_mean(torch.stack([m.mean for m in moments]), counts))
