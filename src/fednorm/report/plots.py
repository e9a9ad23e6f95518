"""Accuracy against rounds: as a PNG of its own, and as SVG that takes the page's colours."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG

from fednorm.experiment.result import Comparison
from fednorm.report.figure import figure
from fednorm.report.setting import setting

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
    with rc_context(_SETTINGS):
        drawn = figure(comparison, ink=_DARK, title=setting(comparison.config))
        FigureCanvasAgg(drawn)
        drawn.savefig(path, format="png", dpi=_DPI, facecolor="white")


def curves_svg(comparison: Comparison) -> str:
    """Return the curves as an SVG element without background, its text in `currentColor`."""
    target = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(_SETTINGS):
        drawn = figure(comparison, ink=_STAND_IN)
        FigureCanvasSVG(drawn)
        drawn.savefig(target, format="svg", transparent=True, metadata=nothing)
    svg = target.getvalue().replace(_STAND_IN, "currentColor")
    return re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
