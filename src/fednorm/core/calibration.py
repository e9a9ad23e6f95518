"""Calibration: clients measure their statistics in a pass over their data, without training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fednorm.core.aggregation import has_quorum
from fednorm.core.layer import NormRule, RoundContext
from fednorm.core.merge import MergeInput
from fednorm.core.messages import (
    Batches,
    Broadcast,
    ClientState,
    LayerStats,
    RejectedReply,
    RunningStats,
    ServerState,
)
from fednorm.core.task import Task, isolated_rng, load_state, select_reporting, start_training
from fednorm.core.types import ClientId
from fednorm.core.validation import find_statistics_fault


@dataclass(frozen=True, slots=True)
class CalibrationReply:
    """What one client's layers saw in a calibration pass."""

    client: ClientId
    examples: int
    stats: Mapping[str, LayerStats]


@torch.no_grad()
def client_calibration(
    task: Task, received: Broadcast, client_state: ClientState, batches: Batches, rule: NormRule
) -> CalibrationReply:
    """Pass a client's batches through the received model; labels are ignored."""
    load_state(task, received.state, client_state)
    start_training(task)
    context = RoundContext()
    for path, layer in task.layout.norms.items():
        layer.start_round(rule, context, path)
    with isolated_rng(batches.seed, task.model):
        for x, _ in batches.steps:
            context.samples = len(x)
            task.model(x)
    reports = {path: layer.report("pool") for path, layer in task.layout.sharing.items()}
    stats = {path: report for path, report in reports.items() if report is not None}
    return CalibrationReply(batches.client, batches.examples, stats)


def server_calibration(
    task: Task, state: ServerState, replies: Sequence[CalibrationReply]
) -> ServerState:
    """Let the strategy adopt the clients' statistics; a faulty reply is rejected by name."""
    good, rejected = [], []
    may_report = select_reporting(task, state)
    for one in sorted(replies, key=lambda s: s.client):
        if found := find_statistics_fault(one.stats, one.examples, may_report):
            rejected.append(RejectedReply(one.client, reason=found[1], where=found[0]))
        else:
            good.append(one)
    statistics = task.statistics_aggregator.without(len(rejected))
    task = replace(task, statistics_aggregator=statistics)
    running = {path: _adopt_layer(task, state, path, good) for path in state.running}
    return replace(state, running=running, rejected=tuple(rejected))


def _adopt_layer(
    task: Task, state: ServerState, path: str, replies: Sequence[CalibrationReply]
) -> RunningStats:
    heard = [s for s in replies if path in s.stats and s.stats[path].moments.count > 0]
    if not has_quorum(task.statistics_aggregator, len(heard)):
        return state.running[path]
    merge = MergeInput(
        reports=[s.stats[path].with_weight(s.examples) for s in heard],
        examples=[s.examples for s in heard],
        aggregator=task.statistics_aggregator,
        layer=task.layout.sharing[path],
    )
    return task.strategy.adopt(state.running[path], merge)
