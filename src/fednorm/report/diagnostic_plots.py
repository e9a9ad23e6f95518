"""Small plots of the values that `--diagnose` records, for the page."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from matplotlib.figure import Figure

from fednorm.experiment.results import Comparison, RunResult
from fednorm.report.curves import draw_curve
from fednorm.report.format import keep_finite
from fednorm.report.series import Curve, summarize_rounds
from fednorm.report.styles import Style, frame_axes, render_svg, use_log_scale

_TITLES = {
    "drift": "drift",
    "deviation": "deviation",
    "statistics_variance": "variance of statistics",
    "gradient_deviation": "gradient deviation",
}
_MEANINGS = {
    "drift": "Drift: how far the shared statistics moved in a round, ‖S(t+1) − S(t)‖₁.",
    "deviation": "Deviation: how far the clients' batch statistics were from them, ‖S_i − S(t)‖₁.",
    "statistics_variance": "Variance of statistics: how much each client's batch statistics S_i "
    "varied over the last 200 rounds, summed over channels, mean over clients.",
    "gradient_deviation": "Gradient deviation: distance of the clients' mean gradient from that of "
    "BatchNorm on their merged batches, with the same dropout masks, relative to it; values "
    "below 0.001 are drawn at 0.001.",
}
_FLOOR = {
    "gradient_deviation": 1e-3
}  # rounding errors are far smaller and would take most of the plot
_SIZE = (3.1, 2.3)  # inches
_MOST = 150  # points of a curve; more are indistinguishable and make the page heavy

Lines = Mapping[str, Curve]  # by strategy


def render_diagnostics(
    comparison: Comparison, styles: Mapping[str, Style], name: str
) -> dict[str, str]:
    """Render each recorded quantity as an SVG element, by title."""
    return {
        _TITLES[key]: render_svg(partial(_draw_figure, lines, styles), f"{key} {name}")
        for key, lines in _collect_recorded(comparison).items()
    }


def list_diagnosed(comparison: Comparison) -> set[str]:
    """Return the methods with recorded diagnostics."""
    return {label for lines in _collect_recorded(comparison).values() for label in lines}


def explain_diagnostics(comparison: Comparison) -> str:
    """Return the caption of the plots."""
    sentences = [_MEANINGS[key] for key in _collect_recorded(comparison)]
    width = _choose_width(comparison.runs)
    if width > 1:
        sentences.append(f"Each point is the mean over {width} rounds.")
    return " ".join([*sentences, "Logarithmic scale; zeros are left out."])


def _collect_recorded(comparison: Comparison) -> dict[str, Lines]:
    width = _choose_width(comparison.runs)
    lines = {
        key: {s.strategy: _average(s.runs, key, width) for s in comparison.summaries()}
        for key in _TITLES
    }
    seen = {key: {k: line for k, line in of.items() if line.rounds} for key, of in lines.items()}
    return {key: of for key, of in seen.items() if of}


def _choose_width(runs: Sequence[RunResult]) -> int:
    """Return how many rounds are averaged into one point."""
    return max(1, ceil(max((len(run.diagnostics) for run in runs), default=0) / _MOST))


def _average(runs: Sequence[RunResult], key: str, width: int) -> Curve:
    found = (
        (width * ceil(number / width), keep_finite(record.get(key)))
        for run in runs
        for number, record in enumerate(run.diagnostics, start=1)
    )
    least = _FLOOR.get(key, 0.0)
    return summarize_rounds((number, max(value, least)) for number, value in found if value)


def _draw_figure(lines: Lines, styles: Mapping[str, Style], ink: str) -> Figure:
    result = Figure(figsize=_SIZE, layout="constrained")
    axes = result.add_subplot()
    frame_axes(axes, ink)
    for number, (label, style) in enumerate(styles.items()):
        if label in lines:
            draw_curve(axes, lines[label], style, number)
    use_log_scale(axes)
    return result
