"""Measurements of `--diagnose` in every round.

After Zhong, Chen and Chao, 2023, arXiv:2303.06530, Figure 3: S are the shared running means and
variances of all BatchNorm layers, S_i the statistics of client i's batches in a round.

| key | what it is |
|---|---|
| `drift` | ‖S(t+1) - S(t)‖₁ |
| `deviation` | ‖S_i - S(t)‖₁, mean over the clients of the round |
| `statistics_variance` | variance of S_i over the last 200 rounds, mean over the clients i |
| `gradient_deviation` | ‖ḡ - g‖/‖g‖ of the clients' mean gradient ḡ; in rounds with an evaluation |
| `bytes_up`, `bytes_down` | of one client, in the mean |
| `exchanges` | there-and-back messages |

A variance over rounds is that of each mean and variance of each channel, summed over all of them
(the paper gives no norm): the mean squared distance of S_i from its mean over the window. A client
counts that took part in two of these rounds or more.

g is the gradient of one machine with ordinary BatchNorm on the merged batches of the round, at the
same weights, and with the same masks: dropout takes the same units from the same samples on both
sides, so that it does not count as deviation. Under FedAvg, which weighs clients by all their
samples, unequal clients deviate a little for that alone. A value is None where there is none:
without shared statistics, in FixBN's stage II (no client reports), and for gradients of several
steps, of models without BatchNorm, or of models that draw random numbers which belong to no sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.algorithms.dsgd import DSGD
from fednorm.algorithms.fedavg import FedAvg
from fednorm.core.aggregation import combine_tensors
from fednorm.core.messages import ClientState, Reply, RunningStats, ServerState
from fednorm.core.round import broadcast, client_round
from fednorm.core.strategy import find_rate
from fednorm.core.task import Task
from fednorm.core.types import ClientId, Tensors
from fednorm.engines.base import ClientSource, RoundResult
from fednorm.engines.merged_batch import UnmatchedDrawError, merge_batches, share_masks
from fednorm.errors import NonFiniteLossError
from fednorm.experiment.build import PreparedRun
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.switch_norm import SwitchableNorm
from fednorm.strategies.naive import Naive

WINDOW = 200  # rounds, as in Figure 3b of arXiv:2303.06530


@dataclass(frozen=True, slots=True)
class WindowMoments:
    """The reports of one client within the window."""

    rounds: Tensor
    vectors: Tensor  # a row for each of these rounds
    variance: float | None = None  # summed over the entries of a vector


Window = Mapping[ClientId, WindowMoments]


def move_window(
    window: Window, round_: int, new: Mapping[ClientId, Tensor], length: int = WINDOW
) -> dict[ClientId, WindowMoments]:
    """Return the window that ends with a round in which clients reported `new`.

    NaN marks entries that a client did not report.
    """
    moved = {}
    for client in sorted({*window, *new}):
        seen = _move(window.get(client), round_ - length, round_, new.get(client))
        if len(seen.rounds):
            moved[client] = seen
    return moved


def mean_variance(window: Window) -> float | None:
    """Return the variance within a client, in the mean over clients with two reports or more."""
    found = [seen.variance for seen in window.values() if seen.variance is not None]
    return fmean(found) if found else None


def _move(
    seen: WindowMoments | None, after: int, round_: int, vector: Tensor | None
) -> WindowMoments:
    if seen and vector is None and seen.rounds[0] > after:
        return seen
    rounds, vectors = [], []
    if seen:
        gone = int((seen.rounds <= after).sum())
        rounds, vectors = [seen.rounds[gone:]], [seen.vectors[gone:]]
    if vector is not None:
        rounds, vectors = [*rounds, torch.tensor([round_])], [*vectors, vector[None]]
    rows = torch.cat(vectors)
    return WindowMoments(torch.cat(rounds), rows, _variance(rows))


def _variance(rows: Tensor) -> float | None:
    if len(rows) < 2:  # noqa: PLR2004 (one value has no variance)
        return None
    exact = rows.to(torch.float64, copy=True)
    mean = Tensor.nanmean if exact.sum().isnan() else Tensor.mean  # nanmean takes 3 times as long
    exact -= mean(exact, 0)
    return float(mean(exact.square_(), 0).nansum())


Diagnostics: TypeAlias = dict[str, float | None]


class Diagnosis:
    """Measures the rounds of one run, one after the other."""

    def __init__(self, prepared: PreparedRun) -> None:
        self.prepared = prepared
        self.before = prepared.task.initial_state
        self.client_states: Mapping[ClientId, ClientState] = {}
        self.window: Window = {}

    def resume(
        self, state: ServerState, client_states: Mapping[ClientId, ClientState], window: Window
    ) -> None:
        """Continue from where a run stopped."""
        self.before, self.client_states, self.window = state, client_states, window

    def measure_round(self, result: RoundResult, *, gradient: bool) -> Diagnostics:
        """Return the measurements of the next round; `gradient` adds the gradient's deviation."""
        task = self.prepared.task
        gone = {rejected.client for rejected in result.state.rejected}
        replies = [reply for reply in result.replies if reply.client not in gone]
        new = {reply.client: batch_vector(task, self.before, reply) for reply in replies}
        seen = {client: vector for client, vector in new.items() if vector is not None}
        self.window = move_window(self.window, result.state.round, seen)
        sends = not self.prepared.entry.centralized  # one machine sends nothing
        found: Diagnostics = {
            "drift": drift(task, self.before, result.state),
            "deviation": deviation(task, self.before, replies),
            "statistics_variance": mean_variance(self.window),
            "gradient_deviation": self._gradient(replies) if gradient else None,
            "bytes_up": float(result.bytes_up * sends),
            "bytes_down": float(result.bytes_down * sends),
            "exchanges": float(result.exchanges * sends),
        }
        self.before, self.client_states = result.state, dict(result.client_states)
        return found

    def _gradient(self, replies: Sequence[Reply]) -> float | None:
        task, plan = self.prepared.task, self.prepared.experiment.plan
        if plan.steps != 1:
            return None
        mean = mean_gradient(task, self.before, self.client_states, replies)
        if mean is None:
            return None
        # One machine draws for the merged batch as for that of one client.
        alone = self.prepared.entry.centralized
        clients = self.prepared.clients if alone else self.prepared.federation
        central = central_gradient(task, self.before, clients)
        return None if central is None else distance(mean, central)


def _select_shared(task: Task) -> list[str]:
    """Return the layers whose means and variances are shared, without backward means."""
    return [path for path, m in task.layout.sharing.items() if isinstance(m, FedBatchNorm)]


def drift(task: Task, before: ServerState, after: ServerState) -> float | None:
    """Return how far the shared statistics moved in a round."""
    changes = [
        _measure_distance(after.running[path].mean, after.running[path].var, before.running[path])
        for path in _select_shared(task)
    ]
    return sum(changes) if changes else None


def deviation(task: Task, before: ServerState, replies: Sequence[Reply]) -> float | None:
    """Return how far the clients' batch statistics are from the shared ones, in the mean."""
    paths = _select_shared(task)
    parts = [
        [
            _measure_distance(*batch_statistics(task, before, path, reply), before.running[path])
            for path in paths
            if path in reply.stats
        ]
        for reply in replies
    ]
    distances = [sum(of_layers) for of_layers in parts if of_layers]
    return fmean(distances) if distances else None


def _measure_distance(mean: Tensor, var: Tensor, shared: RunningStats) -> float:
    return float((mean - shared.mean).abs().sum() + (var - shared.var).abs().sum())


def batch_statistics(
    task: Task, before: ServerState, path: str, reply: Reply
) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of a client's batches in a round, over its steps.

    With `statistics="average"` a client reports running statistics, which hold them in part.
    """
    report = reply.stats[path]
    if task.strategy.statistics == "pool":
        seen = report.join_calls()
        return seen.mean, seen.unbiased_var
    mean, var = report.moments.mean, report.moments.var
    shared, momentum = before.running[path], task.layout.sharing[path].momentum
    rate = find_rate(shared, report.num_batches, momentum)
    return shared.mean + (mean - shared.mean) / rate, shared.var + (var - shared.var) / rate


def batch_vector(task: Task, before: ServerState, reply: Reply) -> Tensor | None:
    """Return a client's batch statistics of a round, layer after layer; None if it sends none.

    A layer that reports nothing has NaN.
    """
    parts: list[Tensor] = []
    for path in _select_shared(task):
        shared = before.running[path]
        mean, var = shared.mean * nan, shared.var * nan
        if path in reply.stats:
            mean, var = batch_statistics(task, before, path, reply)
        parts += [mean.flatten(), var.flatten()]
    vector = torch.cat(parts).cpu() if parts else torch.empty(0)
    return None if vector.isnan().all() else vector


def window_bytes(prepared: PreparedRun) -> int:
    """Return how many bytes the window over the clients' batch statistics may take."""
    experiment, task = prepared.experiment, prepared.task
    if not experiment.diagnose:
        return 0
    running = [task.initial_state.running[path] for path in _select_shared(task)]
    vector = sum(r.mean.nbytes + r.var.nbytes for r in running)
    return vector * min(WINDOW, experiment.rounds) * len(prepared.clients.participants(1))


def mean_gradient(
    task: Task,
    before: ServerState,
    client_states: Mapping[ClientId, ClientState],
    replies: Sequence[Reply],
) -> Tensors | None:
    """Return the aggregate of the clients' gradients, or None if replies do not determine them."""
    nothing = ClientState()
    gradients = [
        _sent_gradient(task, before, client_states.get(reply.client, nothing), reply)
        for reply in replies
    ]
    known = [gradient for gradient in gradients if gradient is not None]
    if len(known) < len(gradients):
        return None
    return combine_tensors(known, [reply.examples for reply in replies], task.aggregator)


def _sent_gradient(
    task: Task, before: ServerState, client_state: ClientState, reply: Reply
) -> Tensors | None:
    """Return the gradient of a round's only step, without momentum and weight decay."""
    algorithm = task.algorithm
    if isinstance(algorithm, DSGD):
        share, old = algorithm.momentum, client_state.optimizer
        steps = {
            name: (sent - share * old[name]) / (1 - share) if name in old else sent / (1 - share)
            for name, sent in reply.update.items()
        }
    elif (
        isinstance(algorithm, FedAvg)
        and algorithm.optimizer == "sgd"
        and not (algorithm.keeps_state or algorithm.sends(reply.update))
    ):  # it moves along the gradient
        rate = algorithm.rate(before.round + 1, task.rounds)
        steps = {
            name: sent / (-rate * task.rates.get(name, 1.0)) for name, sent in reply.update.items()
        }
    else:
        return None
    return {
        name: torch.sub(step, before.weights[name], alpha=algorithm.weight_decay)
        for name, step in steps.items()
    }


def central_gradient(task: Task, before: ServerState, clients: ClientSource) -> Tensors | None:
    """Return the gradient of BatchNorm on the merged batches of the next round.

    It drops the units that the clients drop. None if the layers are not BatchNorm's, if parameters
    are personal, so that there is no one model, if the loss is not finite, or if the model draws
    random numbers that belong to no sample.
    """
    layers = [layer for layer in task.layout.norms.values() if isinstance(layer, FedBatchNorm)]
    mixing = any(isinstance(layer, SwitchableNorm) for layer in layers)
    if not layers or mixing or task.layout.personal_parameters:
        return None
    central = replace(task, strategy=Naive(), algorithm=DSGD())
    number = before.round + 1
    drawn = [clients.batches(client, number) for client in clients.participants(number)]
    parts = [replace(own, steps=[next(iter(own.steps))]) for own in drawn]  # each made once
    batches = merge_batches(parts)
    try:
        with share_masks(parts, central.model):
            reply, _ = client_round(central, broadcast(central, before), ClientState(), batches)
    except (NonFiniteLossError, UnmatchedDrawError):
        return None
    except ValueError:
        if len(next(iter(batches.steps))[1]) > 1:
            raise
        return None  # of one sample, a layer may get one value per channel, without variance
    return reply.update


def distance(gradient: Tensors, reference: Tensors) -> float | None:
    """Return ‖gradient - reference‖/‖reference‖ over the parameters that learn in this round."""
    apart = sum(float((gradient[n] - reference[n]).double().square().sum()) for n in gradient)
    norm = sum(float(reference[n].double().square().sum()) for n in gradient)
    return sqrt(apart / norm) if norm else None
