"""Points on a ring under one normalization layer: FBN's Figures 1 and 2.

Guerraoui, Pinot, Rizk, Stephan and Taïani, "Overcoming the Challenges of Batch Normalization in
Federated Learning", 2024, arXiv:2405.14670, sections 3 and 4.

Ten clients draw 30 new points in every round; the model is one BatchNorm layer and learns nothing.
A share γ of each client's points comes from all classes, the rest from the client's own class. The
normalization error is the Euclidean distance between a point as a method normalises it and as
BatchNorm on one machine with all points of the round does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from fednorm.algorithms.dsgd import DSGD
from fednorm.core.messages import Batches, RunningStats
from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.data.datasets.built_in import Ring
from fednorm.engines import loop, merged_batch
from fednorm.engines.base import ClientSource
from fednorm.engines.merged_batch import MergedClients
from fednorm.report.format import Column, make_table
from fednorm.report.styles import KNOWN, choose_style, use_log_scale, write_png
from fednorm.report.tables import color_label
from fednorm.strategies import create_strategy
from fednorm.system import atomic_write, describe_environment, limit_threads

REFERENCE, METHODS = "centralized", ("centralized", "naive", "fixbn", "fbn")
GAMMAS = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
CLIENTS, POINTS, MOMENTUM = 10, 30, 0.1
_CLASSES = [style.color for style in KNOWN.values() if style is not KNOWN[REFERENCE]][:CLIENTS]
_FEDERATED = METHODS[1:]


@dataclass(frozen=True, slots=True)
class Draws(ClientSource):
    """The points of all rounds and clients."""

    x: Tensor  # [rounds, clients, points, 2]
    y: Tensor  # [rounds, clients, points]

    def all(self) -> list[ClientId]:
        """Return every client."""
        return list(range(CLIENTS))

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


def write_ring(result: RingResult, folder: Path) -> list[Path]:
    """Write ring.json, figure1.png and figure2.png; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("ring.json", "figure1.png", "figure2.png")]
    with atomic_write(paths[0]) as file:
        file.write(f"{json.dumps(result.to_json(), indent=1, allow_nan=False)}\n".encode())
    for target, draw in zip(paths[1:], (_draw_figure_1, _draw_figure_2), strict=True):
        with atomic_write(target) as file:
            write_png(partial(draw, result), file)
    return paths


def build_ring_table(result: RingResult) -> Table:
    """Return the normalization errors for the terminal."""
    rows: list[list[str | Text]] = []
    for method in _FEDERATED:
        found = result.select(method)
        rows.append([color_label(method), "all", *(f"{o.error:.3f}" for o in found)])
        rows.append(["", "second half", *(f"{o.late_error:.3f}" for o in found)])
    return make_table(
        [Column("method"), Column("rounds"), *(Column(f"γ = {g:g}", numbers=True) for g in GAMMAS)],
        rows,
        title="Normalization error: mean distance from centralized BatchNorm",
    )


def _draw_figure_1(result: RingResult, ink: str) -> Figure:
    """Draw what BatchNorm does on one machine, and on clients that each have one class."""
    figure = Figure(figsize=(7.2, 7.6), layout="constrained")
    grid = figure.subplots(2, 2)
    titles = {"centralized": "a  centralized BatchNorm", "naive": "b  naive: each client by itself"}
    _draw_scatters(result, grid.T, titles, ink)
    _explain_marks(figure, ink)
    return figure


def _draw_figure_2(result: RingResult, ink: str) -> Figure:
    """Draw what FBN and FixBN do at the last round, and every method's error by γ."""
    figure = Figure(figsize=(10.8, 7.6), layout="constrained")
    grid = figure.subplots(2, 3)
    _draw_scatters(result, grid.T[:2], {"fbn": "a  FBN", "fixbn": "b  FixBN"}, ink)
    above, below = grid.T[2]
    _draw_errors(above, {m: [o.error for o in result.select(m)] for m in _FEDERATED}, ink)
    _draw_errors(below, {m: [o.late_error for o in result.select(m)] for m in _FEDERATED}, ink)
    above.set_title("c  normalization error, all rounds", loc="left", color=ink, fontsize=11)
    above.legend(frameon=False, labelcolor=ink)
    below.set_title("second half of the rounds, log scale", loc="left", color=ink, fontsize=9)
    use_log_scale(below)
    below.set_xlabel("γ (heterogeneity grows to the right)", color=ink)
    _explain_marks(figure, ink)
    return figure


def _draw_scatters(
    result: RingResult, columns: Sequence[Sequence[Axes]], titles: Mapping[str, str], ink: str
) -> None:
    """Draw a method in each column: with the original points above, alone below."""
    for (whole, alone), (method, title) in zip(columns, titles.items(), strict=True):
        outcome = result.select(method)[0]
        after = outcome.last
        _draw_points(whole, result.before, result.labels, "o")
        _draw_points(whole, after, result.labels, "+")
        _draw_points(alone, after, result.labels, "+")
        whole.set_title(title, loc="left", color=ink, fontsize=11)
        variance = ", ".join(f"{value:.1f}" for value in outcome.variance)
        below = f"after, rescaled; running variance {variance}"
        alone.set_title(below, loc="left", color=ink, fontsize=9)
        for axes in (whole, alone):
            axes.set_aspect("equal", adjustable="datalim")
            _draw_grid(axes, ink)


def _draw_points(axes: Axes, points: Tensor, labels: Tensor, marker: str) -> None:
    size, alpha, width = (22, 1, 0.9) if marker == "+" else (9, 0.3, 0)
    for number, color in enumerate(_CLASSES):
        x, y = points[labels == number].numpy().T
        axes.scatter(x, y, size, color=color, marker=marker, alpha=alpha, linewidths=width)


def _draw_errors(axes: Axes, errors: Mapping[str, Sequence[float]], ink: str) -> None:
    for method, values in errors.items():
        axes.plot(range(len(values)), values, label=method, **choose_style(method).options)
    axes.set_xticks(range(len(GAMMAS)), [f"{gamma:g}" for gamma in GAMMAS])
    axes.invert_xaxis()
    _draw_grid(axes, ink)


def _explain_marks(figure: Figure, ink: str) -> None:
    """Explain the two marks below the figure."""
    dot = Line2D([], [], color=ink, marker="o", markersize=4, alpha=0.4, linestyle="")
    cross = Line2D([], [], color=ink, marker="+", markersize=6, linestyle="")
    figure.legend(
        [dot, cross],
        ["before normalization", "after; colours are classes, one for each client"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        labelcolor=ink,
    )


def _draw_grid(axes: Axes, ink: str) -> None:
    axes.tick_params(which="both", colors=ink, length=0)
    axes.grid(color=ink, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
