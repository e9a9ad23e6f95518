"""What was compared, read from the config: as one line and as TOML values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ASPECTS = ("data", "model", "partition", "clients", "algorithm")


def setting(config: Mapping[str, Any]) -> str:
    """Return data, model, partition, number of clients and algorithm in one line.

    An aspect stands at the top of the config or inside one of its sections; one that the config
    does not name is left out.

    >>> setting({"data": {"name": "digits"}, "partition": {"name": "dirichlet", "alpha": 0.1},
    ...          "federation": {"clients": 10}})
    'digits · dirichlet (alpha 0.1) · 10 clients'
    """
    found = ((aspect, _find(config, aspect)) for aspect in _ASPECTS)
    return " · ".join(_phrase(aspect, value) for aspect, value in found if value is not None)


def _find(config: Mapping[str, Any], aspect: str) -> Any:
    if config.get(aspect) is not None:
        return config[aspect]
    sections = (value for value in config.values() if isinstance(value, Mapping))
    return next((s[aspect] for s in sections if s.get(aspect) is not None), None)


def _phrase(aspect: str, value: Any) -> str:
    if isinstance(value, Mapping):
        rest = {k: v for k, v in value.items() if k != "name" and _is_plain(v)}
        details = ", ".join(f"{k} {_word(v)}" for k, v in rest.items())
        return f"{value.get('name', aspect)}" + (f" ({details})" if details else "")
    if aspect == "clients" and not isinstance(value, str):
        return f"{_word(value)} client{'' if value == 1 else 's'}"
    return _word(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _word(value: Any) -> str:
    return value if isinstance(value, str) else toml(value)


def toml(value: Any) -> str:
    """Write a value as TOML does, without empty texts; None, which TOML lacks, becomes `none`.

    >>> toml({"name": "fixbn", "label": "", "rounds": [1, 2], "affine": False})
    '{ name = "fixbn", rounds = [1, 2], affine = false }'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{k} = {toml(v)}" for k, v in value.items() if v != "")
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
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
            flat[f"{prefix}{key}"] = toml(value)
    return flat


def divide(
    listed: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what all mappings have in common, and what is left of each.

    >>> divide([{"rounds": "9", "gamma": "0"}, {"rounds": "9", "gamma": "1"}])
    ({'rounds': '9'}, [{'gamma': '0'}, {'gamma': '1'}])
    """
    first, *others = listed or [{}]
    shared = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    return shared, [{k: v for k, v in one.items() if k not in shared} for one in listed]
