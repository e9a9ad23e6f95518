"""Plot final values against the parameter that differs between panels, such as γ."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fednorm.report.series import Plots
from fednorm.report.styles import frame_axes, name_method, render_svg

_LETTERS = 44  # of all tick labels that fit without rotation


def render_final_values(plots: Plots, size: tuple[float, float]) -> str:
    """Render the final values of all panels as an SVG element of `size` inches."""

    def draw(ink: str) -> Figure:
        result = Figure(figsize=size, layout="constrained")
        draw_final_values(result.add_subplot(), plots, ink)
        return result

    return render_svg(draw, f"finals {size}")


def draw_final_values(axes: Axes, plots: Plots, ink: str) -> None:
    """Draw final values with their range over seeds; hollow markers are published values."""
    if plots.finals is None:
        return
    frame_axes(axes, ink)
    drawn, styles, number = plots.finals, plots.styles, plots.numbers
    for label, line in drawn.lines.items():
        style = styles[label]
        around = [
            [m - low for m, low in zip(line.mean, line.low, strict=True)],
            [high - m for m, high in zip(line.mean, line.high, strict=True)],
        ]
        axes.errorbar(
            line.rounds,
            line.mean,
            yerr=around,
            color=style.color,
            linestyle=style.line,
            marker=style.marker,
            markersize=5,
            linewidth=1.8,
            gid=name_method(number[label]),
        )
    for label, points in drawn.published.items():
        places, values = zip(*points, strict=True)
        style = styles[label]
        axes.plot(
            places,
            values,
            color=style.color,
            linestyle="",
            marker=style.marker,
            markersize=9,
            markerfacecolor="none",
            gid=name_method(number[label]),
        )
    long = max(map(len, drawn.ticks)) * len(drawn.ticks) > _LETTERS
    axes.set_xticks(range(len(drawn.ticks)), drawn.ticks)
    for tick in axes.get_xticklabels() if long else ():
        tick.set(rotation=30, horizontalalignment="right")
    axes.set_xlabel(drawn.axis, color=ink)
    axes.set_ylabel(f"final {drawn.metric} (%)", color=ink)
