"""Points on a ring under one normalization layer: the numbers behind FBN's Figures 1 and 2.

Guerraoui, Pinot, Rizk, Stephan and Taïani, "Overcoming the Challenges of Batch Normalization in
Federated Learning", 2024, arXiv:2405.14670, sections 3 and 4.

Ten clients draw 30 new points in every round; the model is one BatchNorm layer and learns nothing.
A share γ of each client's points comes from all classes, the rest from the client's own class. The
normalization error is the Euclidean distance between a point as a method normalises it and as
BatchNorm on one machine with all points of the round does.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednorm.algorithms.dsgd import DSGD
from fednorm.core.messages import Batches, RunningStats
from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.data.datasets.synthetic import Ring
from fednorm.engines import loop, merged_batch
from fednorm.engines.merged_batch import MergedClients
from fednorm.strategies import create_strategy
from fednorm.system import describe_environment, limit_threads

REFERENCE, METHODS = "centralized", ("centralized", "naive", "fixbn", "fbn")
GAMMAS = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
CLIENTS, POINTS, MOMENTUM = 10, 30, 0.1


@dataclass(frozen=True, slots=True)
class Draws:
    """The points of all rounds and clients."""

    x: Tensor  # [rounds, clients, points, 2]
    y: Tensor  # [rounds, clients, points]

    def all(self) -> list[ClientId]:
        """Return every client."""
        return list(range(CLIENTS))

    def participants(self, round_: int) -> list[ClientId]:  # noqa: ARG002 (protocol)
        """Return every client."""
        return self.all()

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return the points that a client draws in a round."""
        own = self.x[round_ - 1, client], self.y[round_ - 1, client]
        return Batches(client, [own], examples=POINTS)

    def all_batches(self, client: ClientId) -> Batches:
        """Return a client's points of all rounds."""
        steps = list(zip(self.x[:, client], self.y[:, client], strict=True))
        return Batches(client, steps, examples=POINTS * len(steps))


@dataclass(frozen=True)
class Outcome:
    """One method at one level of heterogeneity."""

    method: str
    gamma: float
    error_by_round: tuple[float, ...]  # mean over points
    mean: tuple[float, ...]  # running statistics after the last round
    variance: tuple[float, ...]
    last: Tensor  # [clients · points, 2], the normalised points of the last round

    @property
    def error(self) -> float:
        """The mean over all rounds."""
        return fmean(self.error_by_round)

    @property
    def late_error(self) -> float:
        """The mean over the second half of the rounds, when the start at 0 and 1 is forgotten."""
        return fmean(self.error_by_round[len(self.error_by_round) // 2 :])

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ring.json, without the points."""
        measured = {"error": self.error, "error_second_half": self.late_error}
        return {key: value for key, value in vars(self).items() if key != "last"} | measured


@dataclass(frozen=True)
class RingResult:
    """All methods at all levels of heterogeneity, and the points of the last round at γ = 0."""

    rounds: int
    seed: int
    outcomes: tuple[Outcome, ...]
    before: Tensor  # [clients · points, 2]
    labels: Tensor

    def select(self, method: str) -> list[Outcome]:
        """Return the outcomes of a method, in the order of γ."""
        return [outcome for outcome in self.outcomes if outcome.method == method]

    def to_json(self) -> dict[str, Any]:
        """Return the content of ring.json."""
        extreme = [outcome for outcome in self.outcomes if outcome.gamma == GAMMAS[0]]
        return {
            "schema": 1,
            "environment": describe_environment(),
            "setting": {
                "clients": CLIENTS,
                "points": POINTS,
                "radius": Ring().radius,
                "std": Ring().std,
                "momentum": MOMENTUM,
                "rounds": self.rounds,
                "seed": self.seed,
            },
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "last_round": {
                "gamma": GAMMAS[0],
                "labels": self.labels.tolist(),
                "before": self.before.tolist(),
                "after": {outcome.method: outcome.last.tolist() for outcome in extreme},
            },
        }


def run_ring(rounds: int = 100, seed: int = 0) -> RingResult:
    """Normalise the same points with every method at every level of heterogeneity."""
    drawn = {gamma: draw_points(gamma, rounds, seed) for gamma in GAMMAS}
    with limit_threads(1):  # the tensors are too small for more
        outcomes = [
            outcome for gamma in GAMMAS for outcome in _compare_methods(gamma, drawn[gamma])
        ]
    extreme = drawn[GAMMAS[0]]
    before, labels = extreme.x[-1].flatten(0, 1), extreme.y[-1].flatten()
    return RingResult(rounds, seed, tuple(outcomes), before, labels)


def draw_points(gamma: float, rounds: int, seed: int) -> Draws:
    """Draw the points: of each client's, a share γ from all classes, the rest from its own."""
    rng = make_rng(seed, Stream.RING_FIGURE)
    shape = (rounds, CLIENTS, POINTS)
    labels = np.broadcast_to(np.arange(CLIENTS)[:, None], shape).copy()
    mixed = round(gamma * POINTS)
    labels[..., :mixed] = rng.integers(CLIENTS, size=shape)[..., :mixed]
    points = Ring(classes=CLIENTS).draw_points(labels.ravel(), rng)
    return Draws(points.double().reshape(*shape, 2), torch.from_numpy(labels))


def _compare_methods(gamma: float, draws: Draws) -> list[Outcome]:
    results = {method: normalize(method, draws) for method in METHODS}
    reference, _ = results[REFERENCE]
    return [
        Outcome(
            method=method,
            gamma=gamma,
            error_by_round=tuple((points - reference).norm(dim=2).mean(1).tolist()),
            mean=tuple(running.mean.tolist()),
            variance=tuple(running.var.tolist()),
            last=points[-1],
        )
        for method, (points, running) in results.items()
    ]


def normalize(method: str, draws: Draws) -> tuple[Tensor, RunningStats]:
    """Run all rounds with a model of one BatchNorm layer.

    Return the normalised points, `[rounds, clients · points, 2]`, and the final statistics.
    """
    central = method == REFERENCE
    layer = nn.BatchNorm1d(2, momentum=MOMENTUM, dtype=torch.float64)
    seen: list[Tensor] = []

    def record(normalized: Tensor, labels: Tensor) -> Tensor:
        del labels
        seen.append(normalized.detach())
        return 0 * normalized.sum()  # a loss without a gradient

    rounds, chosen = len(draws.x), create_strategy("naive" if central else method)
    task = Task.build(layer, chosen, DSGD(), rounds=rounds, loss=record)
    if central:
        *_, last = loop.rounds(task, MergedClients(draws), rounds)
        points = torch.stack(seen)
    else:
        *_, last = merged_batch.rounds(task, draws, rounds)
        interleaved = torch.stack(seen).view(rounds, POINTS, CLIENTS, -1)
        points = interleaved.transpose(1, 2).reshape(rounds, CLIENTS * POINTS, -1)
    (running,) = last.state.running.values()
    return points, running
