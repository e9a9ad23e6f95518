"""What `--diagnose` recorded, as small plots for the page."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from matplotlib.figure import Figure

from fednorm.experiment.result import Comparison, RunResult
from fednorm.report.colors import Style, styles
from fednorm.report.curve import Curve, summarise
from fednorm.report.figure import draw, frame, legend, legend_keys, plain_logarithmic
from fednorm.report.numbers import finite
from fednorm.report.plots import svg

_PANELS = {
    "drift": "drift",
    "deviation": "deviation",
    "gradient_deviation": "gradient deviation",
}
_MEANINGS = {
    "drift": "Drift: how far the shared statistics moved in a round, ‖S(t+1) − S(t)‖₁.",
    "deviation": "Deviation: how far the clients' batch statistics were from them, ‖S_i − S(t)‖₁.",
    "gradient_deviation": "Gradient deviation: distance of the clients' mean gradient from that of "
    "BatchNorm on their merged batches, relative to it; what is below 0.001 stands at 0.001.",
}
_FLOOR = {"gradient_deviation": 1e-3}  # rounding, far below, would take most of the plot
_WIDTH, _HEIGHT = 7.2, 2.4  # inches
_MOST = 150  # points of a curve; more cannot be told apart, and make the page heavy

Lines = Mapping[str, Curve]  # by strategy


def diagnostics_svg(comparison: Comparison) -> str:
    """Return the plots as an SVG element, or nothing if nothing was recorded."""
    panels = _panels(comparison)
    chosen = styles(run.strategy for run in comparison.runs)
    return svg(partial(_figure, panels, chosen)) if panels else ""


def explanation(comparison: Comparison) -> str:
    """Return what the plots show."""
    sentences = [_MEANINGS[key] for key in _panels(comparison)]
    width = _width(comparison.runs)
    if width > 1:
        sentences.append(f"Each point is the mean over {width} rounds.")
    return " ".join([*sentences, "Logarithmic scale; zeros are left out."])


def _panels(comparison: Comparison) -> dict[str, Lines]:
    width = _width(comparison.runs)
    lines = {
        key: {s.strategy: _curve(s.runs, key, width) for s in comparison.summaries()}
        for key in _PANELS
    }
    seen = {key: {k: line for k, line in of.items() if line.rounds} for key, of in lines.items()}
    return {key: of for key, of in seen.items() if of}


def _width(runs: Sequence[RunResult]) -> int:
    """Return how many rounds become one point."""
    return max(1, ceil(max((len(run.diagnostics) for run in runs), default=0) / _MOST))


def _curve(runs: Sequence[RunResult], key: str, width: int) -> Curve:
    found = (
        (width * ceil(number / width), finite(record.get(key)))
        for run in runs
        for number, record in enumerate(run.diagnostics, start=1)
    )
    least = _FLOOR.get(key, 0.0)
    return summarise((number, max(value, least)) for number, value in found if value)


def _figure(panels: Mapping[str, Lines], chosen: Mapping[str, Style], ink: str) -> Figure:
    result = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    grid = result.subplots(1, len(_PANELS), squeeze=False)[0]
    for axes, key in zip(grid, _PANELS, strict=True):
        if key not in panels:
            axes.set_axis_off()
            continue
        frame(axes, ink)
        for index, (label, line) in enumerate(panels[key].items()):
            draw(axes, line, chosen[label], index)
        plain_logarithmic(axes)
        axes.set_title(_PANELS[key], loc="left", color=ink, fontsize=10)
        axes.tick_params(labelsize=8)
    shown = {label for lines in panels.values() for label in lines}
    looks = {label: look for label, look in chosen.items() if label in shown}
    legend(result, legend_keys(looks), ink)
    return result
