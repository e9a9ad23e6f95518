"""Evaluation: calibrate or adapt statistics, then test the global model or every client's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import fmean, median_high
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fednorm.attacks.adversary import Adversary, apply_attack
from fednorm.core.algorithm import Loss
from fednorm.core.layer import RoundContext
from fednorm.core.layout import find_kinds
from fednorm.core.messages import (
    Batches,
    Broadcast,
    ClientState,
    RejectedReply,
    Reply,
    RunningStats,
    ServerState,
    download_bytes,
    report_bytes,
)
from fednorm.core.replies.secure_sum import sum_calibration
from fednorm.core.round import broadcast, client_calibration, server_calibration, start_round
from fednorm.core.targets import DEFAULT_METRICS, Metrics, Tally, drop_last_axis
from fednorm.core.task import Task, export, isolated_rng, start_training
from fednorm.core.types import ClientId, Kind
from fednorm.engines.base import NO_LIMITS, ClientSource, Limits
from fednorm.errors import ConfigError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy (or the main figure of other targets) and mean loss on `examples` test samples."""

    accuracy: float
    loss: float
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # the user's, by name


class TestSource(Protocol):
    """Where each client's test samples and own data come from."""

    def test(self, client: ClientId) -> Iterable[Batch]:
        """Return the test samples of `client`, in batches."""

    def all_batches(self, client: ClientId) -> Batches:
        """Return all training data of `client` once, in batches."""


def is_personal(task: Task) -> bool:
    """Return whether clients keep BatchNorm layers, so that there is no global model."""
    kind = find_kinds(task.model)
    return any(kind[key] in (Kind.AFFINE, Kind.STATISTIC) for key in task.layout.personal)


@torch.no_grad()
def score(
    model: nn.Module, batches: Iterable[Batch], loss: Loss, metrics: Metrics = DEFAULT_METRICS
) -> Score | None:
    """Test a model in evaluation mode; return None if there are no batches."""
    total, examples, main = 0.0, 0, None
    named: dict[str, Tally] = {}
    for inputs, labels in batches:
        outputs = drop_last_axis(model(inputs), labels)
        if main is None:
            main, named = metrics.start(labels)
        for name, tally in (("", main), *named.items()):
            with _name_metric(name):
                tally.add(outputs, labels)
        total += float(loss(outputs, labels)) * len(labels)
        examples += len(labels)
    if main is None:
        return None
    found = {name: _read_value(name, tally) for name, tally in named.items()}
    return Score(main.value, total / examples, examples, found)


def _read_value(name: str, tally: Tally) -> float:
    with _name_metric(name):
        return tally.value


@contextmanager
def _name_metric(name: str) -> Iterator[None]:
    """Say which of the user's metrics failed."""
    try:
        yield
    except Exception as error:
        if not name:
            raise
        raise ConfigError(f"metric {name!r} failed on the test samples: {error}") from error


def score_global(task: Task, state: ServerState, batches: Iterable[Batch]) -> Score:
    """Test the global model."""
    result = score(export(task, state), batches, task.loss, task.metrics)
    if result is None:
        raise ValueError("there are no test samples to evaluate on.")
    return result


def score_clients(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    data: TestSource,
    clients: Iterable[ClientId],
    *,
    adapt: float = 0.0,
) -> dict[ClientId, Score]:
    """Test the models of `clients` on their test samples in `data`, if they have any.

    With `adapt`, each client first re-estimates the statistics on its own data, without labels.
    """
    scores = {}
    for client in clients:
        model = export(task, state, client_states.get(client))
        if adapt:
            adapt_statistics(task, data.all_batches(client), adapt)
        if own := score(model, data.test(client), task.loss, task.metrics):
            scores[client] = own
    return scores


@torch.no_grad()
def find_median_loss(
    task: Task,
    state: ServerState,
    *,
    client_states: Mapping[ClientId, ClientState],
    batches: Sequence[Batches],
) -> float:
    """Return the median of clients' losses on their first batch; NaN counts as infinite.

    Models are in evaluation mode, unless their statistics have to be calibrated for that.
    """
    losses = []
    for own in batches:
        x, y = next(iter(own.steps))
        kept = client_states.get(own.client, ClientState())
        with isolated_rng(own.seed, task.model):
            model = export(task, state, kept)
            if task.strategy.calibration != "never":
                start_round(task, broadcast(task, state), RoundContext(samples=len(y)))
            loss = float(task.loss(model(x), y))
        losses.append(loss if isfinite(loss) else inf)
    return median_high(losses)


@dataclass(frozen=True, slots=True)
class CalibrationCost:
    """Cost of a calibration: exchanges, and bytes of one client."""

    exchanges: int
    bytes_up: float
    bytes_down: float
    rejected: tuple[RejectedReply, ...] = ()  # answers that were not used


# Lets clients on other machines, which keep their states, measure their data.
Ask: TypeAlias = Callable[[Broadcast, Sequence[ClientId]], list[Reply]]


@dataclass(frozen=True, slots=True)
class Transport:
    """How answers reach the server: an adversary may change them; `ask` reaches other machines."""

    adversary: Adversary | None = None
    ask: Ask | None = None
    limits: Limits = NO_LIMITS


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
    if task.secure:
        summed = sum_calibration(task, state, answers, asked=asked)
        after = replace(server_calibration(task, state, [summed.reply]), rejected=summed.rejected)
        return after, CalibrationCost(1, summed.bytes_up, download_bytes(received), after.rejected)
    claims = {c: transport.limits.find_calibration_claim(clients.all_batches(c)) for c in asked}
    after = server_calibration(task, state, answers, asked=claims)
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
