"""Figures as files: as a PNG of its own, and as SVG that takes the page's colours."""

import re
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fednorm.experiment.result import Comparison
from fednorm.experiment.story import Story
from fednorm.report.figure import figure, final_values, single
from fednorm.report.grid import grid_figure, grid_maps, is_full
from fednorm.report.heat import heat_figure, heat_maps
from fednorm.report.panels import Plot, Plots, plots
from fednorm.report.setting import setting

Draw: TypeAlias = Callable[[str], Figure]  # from the colour of text and axes

_DPI = 150
_DARK = "#24292f"
_STAND_IN = "#010203"  # for the page's text colour, until the SVG is written
_SETTINGS: Any = {  # the type of the keys differs between versions of matplotlib
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label with $ is a label, not a formula
}


def curves(story: Story, path: Path) -> None:
    """Write the curves of all panels as one PNG; of a grid that was swept, its heat maps."""
    title = story.title or " – ".join(setting(p.comparison.config) for p in story.panels)
    maps = heat_maps(story)
    if (swept := _swept(story)) and is_full(swept):
        png(partial(grid_figure, swept), path)
    elif story.heat and maps and not story.curve_panels:
        png(partial(heat_figure, maps, story.heat), path)
    else:
        png(lambda ink: figure(plots(story), ink=ink, title=title), path)


def panel_svg(drawn: Plots, plot: Plot, size: tuple[float, float]) -> str:
    """Return the curves of one panel as an SVG element."""
    name = f"{drawn.panels.index(plot)} {size}"
    return svg(lambda ink: single(drawn, plot, size, ink), name)


def finals_svg(drawn: Plots, size: tuple[float, float]) -> str:
    """Return the final values of all panels as an SVG element."""
    return svg(lambda ink: final_values(drawn, size, ink), f"finals {size}")


def heat_svg(story: Story) -> str:
    """Return the heat maps as an SVG element, or nothing."""
    maps = heat_maps(story)
    return svg(partial(heat_figure, maps, story.heat), "heat") if story.heat and maps else ""


def grid_svg(story: Story) -> str:
    """Return the heat maps of a comparison that was swept as an SVG element, or nothing."""
    swept = _swept(story)
    return svg(partial(grid_figure, swept), "grid") if swept else ""


def _swept(story: Story) -> Comparison | None:
    """Return the only comparison of a story if it has a grid of its own."""
    only = story.panels[0].comparison if len(story.panels) == 1 else None
    return only if only and grid_maps(only) else None


def png(draw: Draw, path: Path) -> None:
    """Write a figure as a PNG."""
    with rc_context(_SETTINGS):
        drawn = draw(_DARK)
        FigureCanvasAgg(drawn)
        drawn.savefig(path, format="png", dpi=_DPI, facecolor="white")


def svg(draw: Draw, name: str) -> str:
    """Return a figure as an SVG element without background, its text in `currentColor`.

    What belongs to a method has the attribute `data-method`. The name is that of the figure on
    its page: parts of two figures must not be called the same.
    """
    target = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({**_SETTINGS, "svg.hashsalt": f"fednorm {name}"}):
        drawn = draw(_STAND_IN)
        FigureCanvasSVG(drawn)
        drawn.savefig(target, format="svg", transparent=True, metadata=nothing)
    text = target.getvalue().replace(_STAND_IN, "currentColor")
    text = re.sub(r"<!--.*?-->\n?", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="method-(\d+)"', r'<g data-method="\1"', text)
    text = text.replace('<g id="area"', '<g class="area"')
    # Groups are numbered within a figure; a page with two of them would have each number twice.
    return re.sub(r'<g id="[\w.]+_\d+"', "<g", text)
