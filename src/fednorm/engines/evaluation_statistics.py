"""Statistics for an evaluation: calibration by all clients, adaptation to one client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.attacks import Adversary, apply_attack
from fednorm.core.calibration import CalibrationReply, client_calibration, server_calibration
from fednorm.core.layer import RoundContext
from fednorm.core.messages import (
    Batches,
    Broadcast,
    ClientState,
    RejectedReply,
    RunningStats,
    ServerState,
    download_bytes,
    report_bytes,
)
from fednorm.core.round import broadcast
from fednorm.core.task import Task, isolated_rng, start_training
from fednorm.core.types import ClientId
from fednorm.engines.base import ClientSource


@dataclass(frozen=True, slots=True)
class CalibrationCost:
    """Cost of a calibration: exchanges, and bytes of one client."""

    exchanges: int
    bytes_up: float
    bytes_down: float
    rejected: tuple[RejectedReply, ...] = ()  # answers that were not used


# Lets clients on other machines, which keep their states, measure their data.
Ask: TypeAlias = Callable[[Broadcast, Sequence[ClientId]], list[CalibrationReply]]


@dataclass(frozen=True, slots=True)
class Transport:
    """How answers reach the server: an adversary may change them; `ask` reaches other machines."""

    adversary: Adversary | None = None
    ask: Ask | None = None


DIRECT = Transport()


def calibrate_clients(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    clients: ClientSource,
    asked: Sequence[ClientId],
    transport: Transport = DIRECT,
) -> tuple[ServerState, CalibrationCost]:
    """Measure all data of the `asked` clients and let the strategy adopt the statistics."""
    received, rule = broadcast(task, state), task.strategy.calibration_rule()
    if transport.ask:
        own = transport.ask(received, asked)
    else:
        own = [
            client_calibration(
                task, received, client_states.get(c, ClientState()), clients.all_batches(c), rule
            )
            for c in asked
        ]
    answers = apply_attack(own, transport.adversary, received.round, calibration=True)
    after = server_calibration(task, state, answers)
    size = fmean(report_bytes(answer.stats) for answer in answers) if answers else 0.0
    return after, CalibrationCost(1, size, download_bytes(received), after.rejected)


def calibrate_for_test(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    clients: ClientSource,
    transport: Transport = DIRECT,
) -> ServerState:
    """Return the state that is tested; a strategy may calibrate on all clients first."""
    if task.strategy.calibration != "evaluation":
        return state
    return calibrate_clients(task, state, client_states, clients, clients.all(), transport)[0]


@torch.no_grad()
def adapt_statistics(task: Task, batches: Batches, share: float) -> None:
    """Mix `share` of a client's own statistics into those of the workspace model.

    The model must hold the client's weights, as after `export`, and is left ready for evaluation.
    While the data pass, the model normalizes by the batch, so that the statistics of a layer match
    those of the layers before it. Layers that the user froze keep theirs.
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
    """Return the initial state of an untrained client: the mean of the trained clients' states."""
    kept = (client_states[client].tensors for client in sorted(client_states))
    known = [tensors for tensors in kept if tensors]  # one that diverged may have none
    if not known:
        return ClientState()
    return ClientState(tensors={name: _mean(m[name] for m in known) for name in known[0]})


def _mean(values: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(values))
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)
