"""A survey: the clients' statistics measured in a pass over their data, without training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fednorm.core.combine import after_rejecting, enough
from fednorm.core.inspect import statistics_fault
from fednorm.core.layer import NormRule, Session
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Memory,
    Rejected,
    Report,
    Running,
    ServerState,
)
from fednorm.core.randomness import own_randomness
from fednorm.core.strategy import Merge
from fednorm.core.task import Task, load, reporting, start_training
from fednorm.core.types import ClientId


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What one client's layers saw."""

    client: ClientId
    examples: int
    stats: Mapping[str, Report]


@torch.no_grad()
def client_survey(
    task: Task, received: Broadcast, memory: Memory, batches: Batches, rule: NormRule
) -> Surveyed:
    """Send a client's batches through the received model; labels are not looked at."""
    load(task, received, memory)
    start_training(task)
    session = Session()
    for path, layer in task.layout.norms.items():
        layer.begin(rule, session, path)
    with own_randomness(batches.seed, task.model):
        for x, _ in batches.steps:
            session.samples = len(x)
            task.model(x)
    reports = {path: layer.report("pool") for path, layer in task.layout.sharing.items()}
    stats = {path: report for path, report in reports.items() if report is not None}
    return Surveyed(batches.client, batches.examples, stats)


def server_survey(task: Task, state: ServerState, surveyed: Sequence[Surveyed]) -> ServerState:
    """Let the strategy adopt what all clients saw; a faulty answer is rejected by name."""
    good, rejected = [], []
    may_report = reporting(task, state)
    for one in sorted(surveyed, key=lambda s: s.client):
        if found := statistics_fault(one.stats, one.examples, may_report):
            rejected.append(Rejected(one.client, reason=found[1], where=found[0]))
        else:
            good.append(one)
    statistics = after_rejecting(task.aggregate_statistics, len(rejected))
    task = replace(task, aggregate_statistics=statistics)
    running = {path: _adopted(task, state, path, good) for path in state.running}
    return replace(state, running=running, rejected=tuple(rejected))


def _adopted(task: Task, state: ServerState, path: str, surveyed: Sequence[Surveyed]) -> Running:
    heard = [s for s in surveyed if path in s.stats and s.stats[path].moments.count > 0]
    if not enough(task.aggregate_statistics, len(heard)):
        return state.running[path]
    merge = Merge(
        reports=[s.stats[path].weighed(s.examples) for s in heard],
        examples=[s.examples for s in heard],
        aggregate=task.aggregate_statistics,
        layer=task.layout.sharing[path],
    )
    return task.strategy.adopt(state.running[path], merge)
