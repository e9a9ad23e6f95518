"""How numbers, settings and tables are written, in the terminal and on the page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

MISSING = "–"

_WHOLE = 100  # larger numbers have no decimals
_SHOWN = 4  # names in a list


def keep_finite(value: float | None) -> float | None:
    """Return `value`, or None if it is missing or not finite."""
    return value if value is not None and isfinite(value) else None


def format_percent(fraction: float | None) -> str:
    """Write a fraction in per cent, without the sign.

    >>> format_percent(0.7984), format_percent(None), format_percent(float("nan"))
    ('79.8', '–', '–')
    """
    value = keep_finite(fraction)
    return MISSING if value is None else f"{100 * value:.1f}"


def format_mean(mean: float | None, spread: float, seeds: int) -> str:
    """Write a mean of fractions in per cent; one seed has no spread.

    >>> format_mean(0.7984, 0.004, 3), format_mean(0.7984, 0.0, 1)
    ('79.8 ± 0.4', '79.8')
    """
    with_spread = keep_finite(mean) is not None and keep_finite(spread) is not None and seeds > 1
    written = format_percent(mean)
    return f"{written} ± {format_percent(spread)}" if with_spread else written


def format_share(fraction: float | None) -> str:
    """Write a fraction in per cent, with three digits and the sign.

    >>> format_share(0.98765), format_share(0.00123)
    ('98.8 %', '0.123 %')
    """
    return MISSING if fraction is None else f"{100 * fraction:.3g} %"


def format_ratio(value: float | None) -> str:
    """Write a ratio or an error with three digits.

    >>> format_ratio(0.12345), format_ratio(1.5e-16), format_ratio(None)
    ('0.123', '1.5e-16', '–')
    """
    return MISSING if value is None else f"{value:.3g}"


def format_bytes(count: float | None) -> str:
    """Write a number of bytes in a unit that suits it; 1 kB = 1000 bytes.

    >>> [format_bytes(count) for count in (0, 812, 44_426.0, 1_080_000, None)]
    ['0 bytes', '812 bytes', '44.43 kB', '1.08 MB', '–']
    """
    value = keep_finite(count)
    return MISSING if value is None else decimal(round(value), precision=2)


def format_number(value: float | None) -> str:
    """Write a count or a time: whole where it is whole or large, else with one decimal.

    >>> format_number(58.0), format_number(1.25), format_number(1234.5), format_number(None)
    ('58', '1.2', '1,234', '–')
    """
    number = keep_finite(value)
    if number is None:
        return MISSING
    whole = number == round(number) or number >= _WHOLE
    return f"{number:,.0f}" if whole else f"{number:.1f}"


def format_points(difference: float | None) -> str:
    """Write a difference in points, always with its sign.

    >>> format_points(1.25), format_points(-0.31), format_points(0.02), format_points(None)
    ('+1.2', '−0.3', '0.0', '–')
    """
    value = keep_finite(difference)
    if value is None:
        return MISSING
    text = f"{abs(value):.1f}"
    sign = "−" if value < 0 else "+"
    return text if float(text) == 0 else sign + text


def list_names(names: Sequence[object]) -> str:
    """List names, or the first of many.

    >>> list_names(["a", "b"]), list_names(range(9))
    ('a, b', '0, 1, 2, 3 and 5 more')
    """
    listed = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{listed} and {more} more" if more > 0 else listed


def capitalize(words: str) -> str:
    """Capitalize the first letter only.

    >>> capitalize("accuracy"), capitalize("mean IoU")
    ('Accuracy', 'Mean IoU')
    """
    return words[:1].upper() + words[1:]


def format_toml(value: Any) -> str:
    """Write a value as TOML in one line; empty strings are omitted, None becomes `none`.

    `tomli_w` breaks arrays into lines and refuses None.

    >>> format_toml({"name": "fixbn", "label": "", "rounds": [1, 2], "affine": False})
    '{ name = "fixbn", rounds = [1, 2], affine = false }'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{k} = {format_toml(v)}" for k, v in value.items() if v != "")
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    return str(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value of a nested config under its dotted key; empty tables have none.

    >>> flatten({"rounds": 100, "data": {"name": "digits"}})
    {'rounds': 100, 'data.name': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else None
        flat |= {f"{prefix}{key}": value} if inner is None else inner
    return flat


def split_common(
    listed: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Split mappings into their common items and the rest of each.

    >>> split_common([{"rounds": "9", "gamma": "0"}, {"rounds": "9", "gamma": "1"}])
    ({'rounds': '9'}, [{'gamma': '0'}, {'gamma': '1'}])
    """
    first, *others = listed or [{}]
    shared = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    return shared, [{k: v for k, v in one.items() if k not in shared} for one in listed]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: text, or numbers, which are right-aligned and never wrap."""

    title: str
    numbers: bool = False
    wraps: bool = False


def make_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    caption: str = "",
    ruled: bool = True,
) -> Table:
    """Return a table for the terminal; cells are plain text, not markup.

    A table is ruled below its header and leaves one space between columns; a list is not ruled
    and leaves two.
    """
    listed = list(rows)
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD if ruled else None,
        show_edge=False,
        pad_edge=False,
        padding=0 if ruled else (0, 1),
    )
    for number, column in enumerate(columns):
        widest = max((len(row[number]) for row in listed), default=0)
        table.add_column(
            column.title,
            justify="right" if column.numbers else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            # A number that is cut would be read as another number.
            min_width=widest if column.numbers else None,
        )
    for row in listed:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table
