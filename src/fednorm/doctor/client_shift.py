"""How far the clients are apart in each layer, before any training.

Every client's batches go through the model as in `naive`: each batch is normalised by itself. What
the layers see is summarised by moments and pooled by the law of total variance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fednorm.core.messages import Memory
from fednorm.core.moments import Moments, pool
from fednorm.core.round import broadcast
from fednorm.core.survey import client_survey
from fednorm.core.task import Task
from fednorm.doctor.findings import Distance
from fednorm.doctor.fixed_batches import Drawn
from fednorm.nn import rules

# A channel whose deviation is smaller than so many times its mean is constant up to rounding.
ROUNDING = 1e-6


def distances(task: Task, clients: Drawn, alike: Drawn) -> tuple[Distance, ...]:
    """Return the distances in every layer that tracks statistics and is reached."""
    chance = {path: bias_of(moments) for path, moments in surveyed(task, alike).items()}
    return tuple(
        _distance(path, moments, chance[path]) for path, moments in surveyed(task, clients).items()
    )


def surveyed(task: Task, clients: Drawn) -> dict[str, list[Moments]]:
    """Return what each client's layers saw, by layer."""
    received = broadcast(task, task.initial_state)
    seen = [
        client_survey(task, received, Memory(), clients.everything(c), rules.surveyed).stats
        for c in clients.all()
    ]
    return {path: [_exact(stats[path].moments) for stats in seen] for path in seen[0]}


def _exact(moments: Moments) -> Moments:
    return Moments(moments.count, moments.mean.cpu().double(), moments.var.cpu().double())


def _varying(pooled: Moments) -> Tensor:
    return pooled.var > (ROUNDING * pooled.mean) ** 2


def bias_of(moments: Sequence[Moments]) -> float | None:
    """Return the share of the variance that an average of the clients' variances lacks.

    >>> means, var = torch.tensor([[0.0], [2.0]]), torch.tensor([3.0])
    >>> bias_of([Moments(1.0, mean, var) for mean in means])
    0.25
    """
    pooled = pool(moments)
    weights = torch.tensor([m.count for m in moments], dtype=pooled.var.dtype)
    within = torch.stack([m.var for m in moments]).T @ (weights / weights.sum())
    varying = _varying(pooled)
    if not varying.any():
        return None
    return float((1 - within / pooled.var)[varying].mean())


def _distance(path: str, moments: Sequence[Moments], chance: float | None) -> Distance:
    pooled = pool(moments)
    varying = _varying(pooled)
    constant = int((~varying).sum())
    bias = bias_of(moments)
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
