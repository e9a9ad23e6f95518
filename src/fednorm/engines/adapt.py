"""What a client can do at evaluation: fit statistics to its own data, without labels.

A client that has not trained may do so too; where BatchNorm layers are personal it is tested with
the mean of the layers of those that have, whether it has not yet taken part or never will.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fednorm.core.layer import RoundContext
from fednorm.core.messages import Batches, ClientState, RunningStats
from fednorm.core.randomness import isolated_rng
from fednorm.core.task import Task, start_training
from fednorm.core.types import ClientId


@torch.no_grad()
def adapt_statistics(task: Task, batches: Batches, share: float) -> None:
    """Mix `share` of a client's own statistics into those of the workspace model.

    The model must hold the client's weights, as after `export`, and is left ready for evaluation.
    While its data pass, the model normalises by the batch, so that the statistics of a layer belong
    to the statistics of the layers before it. Layers that the user froze keep theirs.
    """
    layers = {path: m for path, m in task.layout.norms.items() if m.read_running() is not None}
    rule = task.strategy.adaptation_rule()
    for path, layer in layers.items():
        layer.start_round(rule, RoundContext(), path)
    start_training(task)
    with isolated_rng(batches.seed, task.model):
        for x, _ in batches.steps:
            task.model(x)
    task.model.eval()
    for layer in layers.values():
        old, report = layer.read_running(), layer.report("pool")
        if old is None or report is None or not report.moments.var.numel():
            continue
        own = report.moments
        mean = torch.lerp(old.mean, own.mean, share)
        var = torch.lerp(old.var, own.unbiased_var, share)
        layer.load_running(RunningStats(mean, var, old.num_batches))


def initial_client_state(client_states: Mapping[ClientId, ClientState]) -> ClientState:
    """Return what a client without a memory starts from: the mean of those that have one."""
    kept = (client_states[client].tensors for client in sorted(client_states))
    known = [tensors for tensors in kept if tensors]  # one that diverged may have none
    if not known:
        return ClientState()
    return ClientState(tensors={name: _mean(m[name] for m in known) for name in known[0]})


def _mean(values: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(values))
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)
