"""How numbers are written, in tables and sentences alike, so that a reader can find them again."""

from collections.abc import Sequence

MISSING = "–"
_SHOWN = 4  # names in a list


def number(value: float | None) -> str:
    """Write a ratio with three digits.

    >>> number(0.12345), number(1.5e-16), number(None)
    ('0.123', '1.5e-16', '–')
    """
    return MISSING if value is None else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """Write a fraction in per cent.

    >>> percent(0.98765), percent(0.00123)
    ('98.8 %', '0.123 %')
    """
    return MISSING if fraction is None else f"{100 * fraction:.3g} %"


def count(value: float | None) -> str:
    """Write a number of bytes or of other things, to the last digit.

    >>> count(44426.0), count(None)
    ('44,426', '–')
    """
    return MISSING if value is None else f"{value:,.0f}"


def some(names: Sequence[object]) -> str:
    """List names, or the first of many.

    >>> some(["a", "b"]), some(range(9))
    ('a, b', '0, 1, 2, 3 and 5 more')
    """
    listed = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{listed} and {more} more" if more > 0 else listed
