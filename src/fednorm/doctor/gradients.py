"""How far the mean gradient of a strategy is from that of one machine with the same batches.

The machine has ordinary BatchNorm in the network as the strategy converts it: where convolutions
are standardised, its are too. The gradient is the update of `dsgd` without momentum, at the initial
weights; the deviation is ‖mean over clients - machine‖ / ‖machine‖, in the mean over batches.
Dropout layers are off; what else a model draws at random for its samples is the same on both sides.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fednorm.algorithms.dsgd import DSGD
from fednorm.core.aggregator import weighted_mean
from fednorm.core.task import Task
from fednorm.core.types import Tensors
from fednorm.doctor.costs import REFUSALS, Patient, reason, task_of
from fednorm.doctor.findings import Gradient
from fednorm.doctor.fixed_batches import Drawn
from fednorm.doctor.settled import settled
from fednorm.engines.centralized import Merged
from fednorm.engines.clients import Clients
from fednorm.engines.masks import same_masks
from fednorm.engines.simulate import rounds
from fednorm.strategies.naive import Naive

Statistics: TypeAlias = Literal["batch", "exchanged", "start", "surveyed"]

# What is measured: strategies with a global model, and where the statistics come from.
MEASURED: Mapping[str, tuple[Statistics, ...]] = {
    "naive": ("batch",),
    "fbn": ("start", "surveyed"),
    "dualbn": ("start", "surveyed"),
    "fedtan": ("exchanged",),
}
GRADIENT = DSGD(lr=1.0, warmup=0)  # the update is the gradient itself


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy whose dropout layers drop nothing, since masks would blur small batches."""
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return quiet


def gradients(patient: Patient, clients: Drawn, alike: Drawn) -> tuple[Gradient, ...]:
    """Return the deviation of each measured strategy that is registered."""
    names = [entry.name for entry in patient.experiment.strategies if entry.name in MEASURED]
    return tuple(g for name in names for g in _gradients(patient, name, clients, alike))


def _gradients(patient: Patient, name: str, clients: Drawn, alike: Drawn) -> list[Gradient]:
    found: list[Gradient] = []
    try:
        task = replace(task_of(patient, name), algorithm=GRADIENT)
        reference = Task.build(task.strategy.convert(patient.model).model, Naive(), GRADIENT)
        for statistics in MEASURED[name]:
            started = settled(task, clients) if statistics == "surveyed" else task
            measured = deviation(started, reference, clients)
            chance = deviation(task, reference, alike) if statistics == "batch" else None
            excess = None if measured is None or chance is None else measured - chance
            found.append(Gradient(name, statistics, measured, chance, excess))
    except REFUSALS as error:
        missing = MEASURED[name][len(found) :]
        found += [Gradient(name, s, refused=reason(error)) for s in missing]
    return found


def deviation(task: Task, reference: Task, clients: Drawn) -> float | None:
    """Return the relative distance of the mean gradients, in the mean over the batches."""
    relative = []
    for step in clients.one_by_one():
        with same_masks([step.batches(c, 1) for c in step.all()], reference.model):
            central = gradient(reference, Merged(step))
        mean = gradient(task, step)
        size = _norm(central)
        if not size:
            return None
        relative.append(_norm({name: mean[name] - g for name, g in central.items()}) / size)
    return fmean(relative)


def gradient(task: Task, clients: Clients) -> dict[str, Tensor]:
    """Return the mean gradient of a round from the task's initial state."""
    (result,) = rounds(task, clients, 1)
    weights = torch.tensor([reply.examples for reply in result.replies], dtype=torch.float64)
    updates = [reply.update for reply in result.replies]
    return {
        name: weighted_mean(torch.stack([update[name] for update in updates]).double(), weights)
        for name in updates[0]
    }


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))
