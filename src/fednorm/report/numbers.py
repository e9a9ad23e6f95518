"""How numbers and their names are written, in tables and sentences alike."""

from math import isfinite

MISSING = "–"

_UNITS = ("B", "kB", "MB", "GB")
_STEP = 1000
_WHOLE = 100  # from here on, decimals say nothing


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is none or not a finite number."""
    return value if value is not None and isfinite(value) else None


def percent(fraction: float | None) -> str:
    """Write a fraction in per cent, without the sign.

    >>> percent(0.7984), percent(None), percent(float("nan"))
    ('79.8', '–', '–')
    """
    value = finite(fraction)
    return MISSING if value is None else f"{100 * value:.1f}"


def mean_and_spread(mean: float | None, spread: float, seeds: int) -> str:
    """Write a mean of fractions in per cent; one seed has no spread.

    >>> mean_and_spread(0.7984, 0.004, 3), mean_and_spread(0.7984, 0.0, 1)
    ('79.8 ± 0.4', '79.8')
    """
    with_spread = finite(mean) is not None and finite(spread) is not None and seeds > 1
    return f"{percent(mean)} ± {percent(spread)}" if with_spread else percent(mean)


def size(count: float | None) -> str:
    """Write a number of bytes with three digits; 1 kB = 1000 B.

    >>> size(0), size(812), size(44_426), size(1_080_000), size(None)
    ('0', '812 B', '44.4 kB', '1.08 MB', '–')
    """
    value = finite(count)
    if not value:
        return MISSING if value is None else "0"
    power = 0
    while round(value) >= _STEP and power < len(_UNITS) - 1:
        value, power = value / _STEP, power + 1
    decimals = min(power, 1) * max(0, 3 - len(f"{value:.0f}"))
    return f"{value:.{decimals}f} {_UNITS[power]}"


def plain(value: float | None) -> str:
    """Write any other number: whole where it is whole or large, else with one decimal.

    >>> plain(58.0), plain(1.25), plain(1234.5), plain(None)
    ('58', '1.2', '1,234', '–')
    """
    number = finite(value)
    if number is None:
        return MISSING
    whole = number == round(number) or number >= _WHOLE
    return f"{number:,.0f}" if whole else f"{number:.1f}"


def points(difference: float | None) -> str:
    """Write a difference in points, always with its sign.

    >>> points(1.25), points(-0.31), points(0.02), points(None)
    ('+1.2', '−0.3', '0.0', '–')
    """
    value = finite(difference)
    if value is None:
        return MISSING
    text = f"{abs(value):.1f}"
    sign = "−" if value < 0 else "+"
    return text if float(text) == 0 else sign + text


def sentence_case(words: str) -> str:
    """Begin with a capital, as at the start of a sentence.

    >>> sentence_case("accuracy"), sentence_case("mean IoU")
    ('Accuracy', 'Mean IoU')
    """
    return words[:1].upper() + words[1:]
