"""Measure how far clients are apart in each layer, before any training.

As in `naive`, the batches of every client pass through the model at its initial weights, and each
batch is normalised by itself. The moments of the layers' inputs are pooled by the law of total
variance. The same measurement with samples dealt to clients at random shows how much of a distance
is due to small batches.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fednorm.core.messages import ClientState
from fednorm.core.moments import Moments, pool
from fednorm.core.round import broadcast, client_calibration
from fednorm.core.task import Task, isolated_rng
from fednorm.data import Dataset
from fednorm.doctor.costs import (
    REFUSALS,
    ExaminedModel,
    FixedBatches,
    deal_again,
    describe_error,
    draw,
)
from fednorm.doctor.findings import ClientShift, Distance
from fednorm.doctor.gradients import GRADIENT, disable_dropout, measure_gradients
from fednorm.experiment.build import build_clients
from fednorm.nn import rules
from fednorm.strategies.naive import Naive

LEAST = 2  # clients needed for a distance
# A channel is constant up to rounding if its standard deviation is below this share of its mean.
ROUNDING = 1e-6


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
