"""Styles of methods and axes, and the output of figures as PNG or SVG.

A method has the same colour, marker and line in each table and plot. Colours have a contrast of at
least 3 to white and to the page's dark background. Those of the first eight strategies were chosen
for their distance under protanopia, deuteranopia and tritanopia; beyond that number, colour alone
cannot tell lines apart, so every name has a marker too. Lines tell families apart: dotted for the
reference, solid for shared statistics, dash-dot for personal ones, dashed for methods without batch
statistics.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from typing import IO, Any, Literal, TypeAlias
from zlib import crc32

from matplotlib import path as shapes
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Affine2D

Line: TypeAlias = Literal["-", "--", "-.", ":"]
Draw: TypeAlias = Callable[[str], Figure]  # takes the colour of text and axes

LINES: tuple[Line, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d")


@dataclass(frozen=True, slots=True)
class Style:
    """How a strategy is drawn; markers and lines are matplotlib's."""

    color: str
    marker: str
    line: Line = "-"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of matplotlib for a line in this style."""
        return {
            "color": self.color,
            "linestyle": self.line,
            "marker": self.marker,
            "markersize": 5,
            "linewidth": 1.8,
        }

    @property
    def dashes(self) -> str:
        """The line as an SVG dash pattern."""
        return _DASHES[self.line]

    @property
    def outline(self) -> str:
        """The marker as an SVG path, in the middle of the page's swatch."""
        return _trace_marker(self.marker)


KNOWN = {
    "centralized": Style("#91949d", "o", ":"),
    "naive": Style("#ea5d12", "v"),
    "fixbn": Style("#8d5a25", "s"),
    "fbn": Style("#159bed", "o"),
    "fedtan": Style("#2e985c", "D"),
    "fedbn": Style("#8b22ee", "^", "-."),
    "silobn": Style("#c332aa", "P", "-."),
    "gn": Style("#1d7071", "X", "--"),
    "ln": Style("#3e99bc", "<", "--"),
    "in": Style("#41a436", ">", "--"),
    "none": Style("#c44350", "p", "--"),
    "dualbn": Style("#3a73d3", "h"),
    "alignbn": Style("#b8860b", "D"),
    "heterofl": Style("#938b0c", "d"),
    "feddna": Style("#f54281", "s"),
    "hbn": Style("#2a804d", "^"),
    "gn_ws": Style("#108685", "s", "--"),
    "fixup": Style("#73872d", "D", "--"),
    "fedwon": Style("#d9734a", "o", "--"),
    "switchnorm": Style("#f133f6", "X"),
    "brn": Style("#9337c3", "p"),
    "fedfn": Style("#2f84dd", "v"),
}
OTHERS = ("#d02990", "#337226", "#81700a", "#7944d8", "#be08a6")

_SWATCH_MIDDLE, _SWATCH_MARKER = (15, 6), 7.5  # pixels, in the template's box of 30 by 12
_DASHES: dict[Line, str] = {"-": "none", "--": "6 3", "-.": "7 2.5 1.5 2.5", ":": "1.5 2.5"}
_LETTER = {
    int(shapes.Path.MOVETO): "M",
    int(shapes.Path.LINETO): "L",
    int(shapes.Path.CURVE3): "Q",
    int(shapes.Path.CURVE4): "C",
    int(shapes.Path.CLOSEPOLY): "Z",
}
_NARROW, _WIDEN, _WIDE = 4, 1.6, 100  # ratios of the ends of a logarithmic axis
_DPI = 150
_DARK = "#24292f"
_STAND_IN = "#010203"  # replaced by the page's text colour in the SVG
_SETTINGS: Any = {  # the type of the keys differs between versions of matplotlib
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label with $ is a label, not a formula
}

_PRINT_DPI = 300
_PRINTED: Any = {
    "font.size": 8,  # at the size in which it is printed
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "fednorm",
}


def find_known_name(label: str) -> str | None:
    """Return the first word of the label that names a strategy.

    >>> [find_known_name(label) for label in ("centralized:gn", "fixbn auto", "mine")]
    ['centralized', 'fixbn', None]
    """
    words = re.findall(r"\w+", label.lower())
    return next((word for word in words if word in KNOWN), None)


def choose_style(label: str) -> Style:
    """Return the style of the name in `label`, or one derived from its letters."""
    if name := find_known_name(label):
        return KNOWN[name]
    number = crc32(label.encode())
    return Style(OTHERS[number % len(OTHERS)], MARKERS[number // len(OTHERS) % len(MARKERS)])


def choose_styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return a different style for each of `labels`.

    Labels of one strategy ("fixbn", "fixbn auto") share its colour; the second and later ones get
    another line and marker.
    """
    chosen: dict[str, Style] = {}
    seen: Counter[Style] = Counter()
    for label in dict.fromkeys(labels):
        first = choose_style(label)
        line = LINES[(LINES.index(first.line) + seen[first]) % len(LINES)]
        marker = MARKERS[(MARKERS.index(first.marker) + seen[first]) % len(MARKERS)]
        chosen[label] = replace(first, line=line, marker=marker)
        seen[first] += 1
    return chosen


@cache
def _trace_marker(marker: str) -> str:
    """Return a matplotlib marker, whose y axis points up, as an SVG path."""
    shape = MarkerStyle(marker)
    scaled = Affine2D().scale(_SWATCH_MARKER, -_SWATCH_MARKER)
    place = scaled.translate(*_SWATCH_MIDDLE)
    path = shape.get_path().transformed(shape.get_transform() + place)
    parts: list[str] = []
    for points, code in path.iter_segments(curves=True, simplify=False):
        letter = _LETTER[int(code)]
        numbers = "" if letter == "Z" else " ".join(f"{value:.4g}" for value in points)
        parts.append(letter + numbers)
    return "".join(parts)


def frame_axes(axes: Axes, ink: str) -> None:
    """Style the axes of a plot by round."""
    axes.set_xlabel("round", color=ink)
    axes.tick_params(colors=ink, length=0)
    axes.grid(axis="y", color=ink, alpha=0.15, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(color=ink, alpha=0.5)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    axes.margins(x=0.02)


def use_log_scale(axes: Axes) -> None:
    """Use a logarithmic y axis with plain numbers and at least one visible tick."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < _NARROW:
        low, high = low / _WIDEN, high * _WIDEN
        axes.set_ylim(low, high)
    between = (1.0,) if high / low > _WIDE else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def write_png(draw: Draw, file: IO[bytes]) -> None:
    """Write the figure that `draw` makes as a PNG."""
    with rc_context(_SETTINGS):
        drawn = draw(_DARK)
        FigureCanvasAgg(drawn)
        drawn.savefig(file, format="png", dpi=_DPI, facecolor="white")


def write_print(draw: Draw, file: IO[bytes], kind: str) -> None:
    """Write the figure that `draw` makes for a paper: as "pdf", "svg" or "png".

    Fonts are embedded: as type 42 in a PDF, as outlines in an SVG.
    """
    undated = {"pdf": "CreationDate", "svg": "Date"}
    with rc_context({**_SETTINGS, **_PRINTED}):
        drawn = draw("black")
        FigureCanvasAgg(drawn)
        metadata = {undated[kind]: None} if kind in undated else None
        drawn.savefig(file, format=kind, dpi=_PRINT_DPI, facecolor="white", metadata=metadata)


def name_method(number: int) -> str:
    """Return the gid of artists of a method; in SVG it becomes `data-method`."""
    return f"method-{number}"


def render_svg(draw: Draw, name: str) -> str:
    """Render the figure that `draw` makes as an SVG element, its text in `currentColor`.

    Elements of a method have the attribute `data-method`, for the page's script. `name` must be
    unique on the page, so that the ids of two figures differ.
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
