"""A method's line and marker as a small SVG element, for legends and tables."""

from functools import cache

from matplotlib.markers import MarkerStyle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from fednorm.report.colors import Line, Style

_WIDTH, _HEIGHT, _MARKER = 30, 12, 7.5  # pixels
_DASHES: dict[Line, str] = {"-": "none", "--": "6 3", "-.": "7 2.5 1.5 2.5", ":": "1.5 2.5"}
_LETTER = {
    int(Path.MOVETO): "M",
    int(Path.LINETO): "L",
    int(Path.CURVE3): "Q",
    int(Path.CURVE4): "C",
    int(Path.CLOSEPOLY): "Z",
}


@cache
def swatch(look: Style) -> str:
    """Return the element; those who cannot see it have the name beside it."""
    middle = _HEIGHT / 2
    return (
        f'<svg class="swatch" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">'
        f'<path d="M0 {middle:g}H{_WIDTH}" fill="none" stroke="{look.color}" stroke-width="2" '
        f'stroke-dasharray="{_DASHES[look.line]}"/>'
        f'<path d="{_marker(look.marker)}" fill="{look.color}"/></svg>'
    )


def _marker(name: str) -> str:
    """Return the outline of one of matplotlib's markers, which has y upwards."""
    shape = MarkerStyle(name)
    place = Affine2D().scale(_MARKER, -_MARKER).translate(_WIDTH / 2, _HEIGHT / 2)
    path = shape.get_path().transformed(shape.get_transform() + place)
    parts: list[str] = []
    for points, code in path.iter_segments(curves=True, simplify=False):
        letter = _LETTER[int(code)]
        numbers = "" if letter == "Z" else " ".join(f"{value:.4g}" for value in points)
        parts.append(letter + numbers)
    return "".join(parts)
