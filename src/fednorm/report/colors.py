"""The look of every strategy: the same colour, marker and line in each table and plot.

Colours have a contrast of at least 3 to white and to the page's dark background. Those of the
first eight strategies were chosen for their distance under protanopia, deuteranopia and
tritanopia; beyond that many, colour alone cannot tell lines apart, so every name has a marker too.
Lines tell families apart: dotted for the reference, solid for shared statistics, dash-dot for
personal ones, dashed for methods without batch statistics.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias
from zlib import crc32

Line: TypeAlias = Literal["-", "--", "-.", ":"]

LINES: tuple[Line, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d")


@dataclass(frozen=True, slots=True)
class Style:
    """How a strategy is drawn; markers and lines are matplotlib's."""

    color: str
    marker: str
    line: Line = "-"


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


def known_name(label: str) -> str | None:
    """Return the first word of the label that names a strategy.

    >>> known_name("centralized:gn"), known_name("fixbn auto"), known_name("mine")
    ('centralized', 'fixbn', None)
    """
    words = re.findall(r"\w+", label.lower())
    return next((word for word in words if word in KNOWN), None)


def style(label: str) -> Style:
    """Return the style of a label: that of its known name, or one derived from its letters."""
    if name := known_name(label):
        return KNOWN[name]
    number = crc32(label.encode())
    return Style(OTHERS[number % len(OTHERS)], MARKERS[number // len(OTHERS) % len(MARKERS)])


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return a style for every label of one comparison, all different.

    Labels of one strategy ("fixbn", "fixbn auto") share its colour; the second and later ones get
    another line and marker.
    """
    chosen: dict[str, Style] = {}
    seen: Counter[Style] = Counter()
    for label in dict.fromkeys(labels):
        first = style(label)
        chosen[label] = _variant(first, seen[first])
        seen[first] += 1
    return chosen


def _variant(first: Style, number: int) -> Style:
    line = LINES[(LINES.index(first.line) + number) % len(LINES)]
    marker = MARKERS[(MARKERS.index(first.marker) + number) % len(MARKERS)]
    return replace(first, line=line, marker=marker)
