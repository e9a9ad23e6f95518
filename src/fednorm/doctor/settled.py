"""Shared statistics as they would be after a while, with the weights standing still.

One machine that holds the clients' batches measures them: those of the forward pass, and the means
of the backward pass where a strategy shares these, too. They belong together, because every layer
is given what the layers before it make of all clients' samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.aggregator import weighted_mean
from fednorm.core.layer import Session
from fednorm.core.messages import Memory, Report, Running
from fednorm.core.moments import pool
from fednorm.core.task import Task, load, start_training
from fednorm.doctor.drawn import Drawn
from fednorm.engines.centralized import Merged
from fednorm.nn import rules
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.dual_norm import BackwardMeans


def observed(layer: FedBatchNorm, x: Tensor) -> Tensor:
    """Normalise with the batch's own statistics; record the moments, forward and backward."""
    layer.record(x)
    y = rules.untracked(layer, x)
    means = getattr(layer, "backward_means", None)
    if isinstance(means, BackwardMeans) and y.requires_grad:
        normalised = functional.batch_norm(x.detach(), None, None, training=True, eps=layer.eps)

        def note(gradient: Tensor) -> None:
            means.record(gradient, normalised)

        y.register_hook(note)  # type: ignore[no-untyped-call]  # torch's own
    return y


def settled(task: Task, clients: Drawn) -> Task:
    """Return the task with statistics measured on all clients' batches, side by side."""
    state = task.initial_state
    load(task, state, Memory())
    start_training(task)
    reports: dict[str, list[Report]] = {path: [] for path in task.layout.sharing}
    for x, y in Merged(clients).batches(0, 1).steps:
        for path, layer in task.layout.norms.items():
            layer.begin(observed, Session(), path)
        loss = task.loss(task.model(x), y)
        torch.autograd.grad(loss, list(task.layout.shared.values()), allow_unused=True)
        for path, layer in task.layout.sharing.items():
            if (report := layer.report("pool")) is not None:
                reports[path].append(report)
    running = {
        path: _adopted(before, reports[path]) if reports[path] else before
        for path, before in state.running.items()
    }
    return replace(task, initial_state=replace(state, running=running))


def _adopted(before: Running, reports: Sequence[Report]) -> Running:
    """Return what all batches showed together."""
    moments = [report.moments for report in reports]
    if before.var.numel():
        pooled = pool(moments)
        return replace(before, mean=pooled.mean, var=pooled.unbiased_var)
    # Backward means have no variance to pool.
    counts = torch.tensor([m.count for m in moments], dtype=torch.float64)
    return replace(before, mean=weighted_mean(torch.stack([m.mean for m in moments]), counts))
