"""Figures as files: as a PNG of its own, and as SVG that takes the page's colours."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fednorm.experiment.result import Comparison
from fednorm.report.figure import figure
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
    "svg.hashsalt": "fednorm",
    "text.parse_math": False,  # a label with $ is a label, not a formula
}


def curves(comparison: Comparison, path: Path) -> None:
    """Write the curves as a PNG."""
    png(lambda ink: figure(comparison, ink=ink, title=setting(comparison.config)), path)


def curves_svg(comparison: Comparison) -> str:
    """Return the curves as an SVG element without background, its text in `currentColor`."""
    return svg(lambda ink: figure(comparison, ink=ink))


def png(draw: Draw, path: Path) -> None:
    """Write a figure as a PNG."""
    with rc_context(_SETTINGS):
        drawn = draw(_DARK)
        FigureCanvasAgg(drawn)
        drawn.savefig(path, format="png", dpi=_DPI, facecolor="white")


def svg(draw: Draw) -> str:
    """Return a figure as an SVG element without background, its text in `currentColor`."""
    target = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(_SETTINGS):
        drawn = draw(_STAND_IN)
        FigureCanvasSVG(drawn)
        drawn.savefig(target, format="svg", transparent=True, metadata=nothing)
    text = target.getvalue().replace(_STAND_IN, "currentColor")
    text = re.sub(r"<!--.*?-->\n?", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Groups are numbered within a figure; a page with two of them would have each number twice.
    return re.sub(r'<g id="[\w.]+_\d+"', "<g", text)
