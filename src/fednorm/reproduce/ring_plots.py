"""The points on a ring as FBN's Figures 1 and 2, as a table, and as JSON."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fednorm.report.format import Column, make_table
from fednorm.report.styles import KNOWN, choose_style, use_log_scale, write_png
from fednorm.report.tables import color_label
from fednorm.reproduce.ring import CLIENTS, GAMMAS, METHODS, REFERENCE, RingResult
from fednorm.system import atomic_write

_CLASSES = [style.color for style in KNOWN.values() if style is not KNOWN[REFERENCE]][:CLIENTS]
_FEDERATED = [method for method in METHODS if method != REFERENCE]
_BEFORE, _AFTER = "before normalization", "after"
_FIGURE_1 = {"centralized": "a  centralized BatchNorm", "naive": "b  naive: each client by itself"}
_FIGURE_2 = {"fbn": "a  FBN", "fixbn": "b  FixBN"}


def write_ring(result: RingResult, folder: Path) -> list[Path]:
    """Write ring.json, figure1.png and figure2.png; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("ring.json", "figure1.png", "figure2.png")]
    with atomic_write(paths[0]) as file:
        file.write(f"{json.dumps(result.to_json(), indent=1, allow_nan=False)}\n".encode())
    for target, draw in zip(paths[1:], (draw_figure_1, draw_figure_2), strict=True):
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


def draw_figure_1(result: RingResult, ink: str) -> Figure:
    """Draw what BatchNorm does on one machine, and on clients that each have one class."""
    figure = Figure(figsize=(7.2, 7.6), layout="constrained")
    grid = figure.subplots(2, 2)
    _draw_scatters(result, grid.T, _FIGURE_1, ink)
    _explain_marks(figure, ink)
    return figure


def draw_figure_2(result: RingResult, ink: str) -> Figure:
    """Draw what FBN and FixBN do at the last round, and every method's error by γ."""
    figure = Figure(figsize=(10.8, 7.6), layout="constrained")
    grid = figure.subplots(2, 3)
    _draw_scatters(result, grid.T[:2], _FIGURE_2, ink)
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
        below = f"{_AFTER}, rescaled; running variance {variance}"
        alone.set_title(below, loc="left", color=ink, fontsize=9)
        for axes in (whole, alone):
            axes.set_aspect("equal", adjustable="datalim")
            _draw_grid(axes, ink)


def _draw_points(axes: Axes, points: Tensor, labels: Tensor, marker: str) -> None:
    after = marker == "+"
    size, alpha, width = (22, 1, 0.9) if after else (9, 0.3, 0)
    for number, color in enumerate(_CLASSES):
        x, y = points[labels == number].numpy().T
        axes.scatter(x, y, size, color=color, marker=marker, alpha=alpha, linewidths=width)


def _draw_errors(axes: Axes, errors: Mapping[str, Sequence[float]], ink: str) -> None:
    for method, values in errors.items():
        style = choose_style(method)
        look: dict[str, Any] = {"color": style.color, "marker": style.marker, "linewidth": 1.8}
        axes.plot(range(len(values)), values, label=method, **look)
    axes.set_xticks(range(len(GAMMAS)), [f"{gamma:g}" for gamma in GAMMAS])
    axes.invert_xaxis()
    _draw_grid(axes, ink)


def _explain_marks(figure: Figure, ink: str) -> None:
    """Explain the two marks below the figure."""
    dot = Line2D([], [], color=ink, marker="o", markersize=4, alpha=0.4, linestyle="")
    cross = Line2D([], [], color=ink, marker="+", markersize=6, linestyle="")
    figure.legend(
        [dot, cross],
        [_BEFORE, f"{_AFTER}; colours are classes, one for each client"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        labelcolor=ink,
    )


def _draw_grid(axes: Axes, ink: str) -> None:
    axes.tick_params(which="both", colors=ink, length=0)
    axes.grid(color=ink, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
