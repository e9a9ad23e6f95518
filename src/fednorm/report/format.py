"""How numbers and settings are written, in tables and sentences alike."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

MISSING = "–"

_ASPECTS = ("data", "model", "partition", "clients", "algorithm")
_UNITS = ("B", "kB", "MB", "GB")
_STEP = 1000
_WHOLE = 100  # from here on, decimals say nothing


def keep_finite(value: float | None) -> float | None:
    """Return the value, or None if it is none or not a finite number."""
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


def format_bytes(count: float | None) -> str:
    """Write a number of bytes with three digits; 1 kB = 1000 B.

    >>> [format_bytes(count) for count in (0, 812, 44_426, 1_080_000, None)]
    ['0', '812 B', '44.4 kB', '1.08 MB', '–']
    """
    value = keep_finite(count)
    if not value:
        return MISSING if value is None else "0"
    power = 0
    while round(value) >= _STEP and power < len(_UNITS) - 1:
        value, power = value / _STEP, power + 1
    decimals = min(power, 1) * max(0, 3 - len(f"{value:.0f}"))
    return f"{value:.{decimals}f} {_UNITS[power]}"


def format_number(value: float | None) -> str:
    """Write any other number: whole where it is whole or large, else with one decimal.

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


def capitalize(words: str) -> str:
    """Begin with a capital, as at the start of a sentence.

    >>> capitalize("accuracy"), capitalize("mean IoU")
    ('Accuracy', 'Mean IoU')
    """
    return words[:1].upper() + words[1:]


def describe_setting(config: Mapping[str, Any]) -> str:
    """Return data, model, partition, number of clients and algorithm in one line.

    An aspect stands at the top of the config or inside one of its sections; one that the config
    does not name is left out.

    >>> describe_setting({"data": {"name": "digits"}, "federation": {"clients": 10},
    ...                   "partition": {"name": "dirichlet", "alpha": 0.1}})
    'digits · dirichlet (alpha 0.1) · 10 clients'
    """
    found = ((aspect, _find_aspect(config, aspect)) for aspect in _ASPECTS)
    return " · ".join(
        _describe_aspect(aspect, value) for aspect, value in found if value is not None
    )


def _find_aspect(config: Mapping[str, Any], aspect: str) -> Any:
    if config.get(aspect) is not None:
        return config[aspect]
    sections = (value for value in config.values() if isinstance(value, Mapping))
    return next((s[aspect] for s in sections if s.get(aspect) is not None), None)


def _describe_aspect(aspect: str, value: Any) -> str:
    if isinstance(value, Mapping):
        rest = {k: v for k, v in value.items() if k != "name" and _is_plain(v)}
        details = ", ".join(f"{k} {_format_word(v)}" for k, v in rest.items())
        return f"{value.get('name', aspect)}" + (f" ({details})" if details else "")
    if aspect == "clients" and not isinstance(value, str):
        return f"{_format_word(value)} client{'' if value == 1 else 's'}"
    return _format_word(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _format_word(value: Any) -> str:
    return value if isinstance(value, str) else format_toml(value)


def format_toml(value: Any) -> str:
    """Write a value as TOML does, without empty texts; None, which TOML lacks, becomes `none`.

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


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return every value of a nested config under its dotted key; empty tables have none.

    >>> flatten({"rounds": 100, "data": {"name": "digits"}})
    {'rounds': '100', 'data.name': '"digits"'}
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = format_toml(value)
    return flat


def split_common(
    listed: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what all mappings have in common, and what is left of each.

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
