"""Experiments from TOML files, `--set` and `--sweep`; an unknown key is an error with a hint."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError

from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.registry import RENAMED, unknown

_CHOICES = re.compile(r",(?![^(]*\))")  # commas, but not those inside brackets


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}.") from None
    except (ValueError, RecursionError, OSError) as error:  # also of numbers with 5000 digits
        raise ConfigError(f"{str(path)!r} cannot be read as TOML: {error}.") from None


def override_settings(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` settings to the values; `table.key` sets a key of a table.

    >>> override_settings({"data": "digits"}, ["data.test=100", "partition=gamma=0.5"])
    {'data': {'name': 'digits', 'test': 100}, 'partition': 'gamma=0.5'}
    """
    result = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, not {setting!r}.")
        table, dot, field = key.strip().partition(".")
        if dot:
            known = Experiment.model_fields.get(table)  # of which only one field is given
            inner = result.get(table, known.default if known else {})
            inner = {} if inner is None and table == "privacy" else inner
            if not isinstance(inner, str | Mapping):
                raise ConfigError(f"{table} is not a table, so {key.strip()} cannot be set in it.")
            inner = {"name": inner} if isinstance(inner, str) else dict(inner)
            result[table] = {**inner, field: parse_value(text)}
        else:
            result[table] = parse_value(text)
    return result


def parse_value(text: str) -> Any:
    """Read a TOML value, or else plain text.

    >>> parse_value("0.1"), parse_value("auto"), parse_value("[1, 2]")
    (0.1, 'auto', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()


def expand_sweep(values: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Replace each strategy of the values by one entry for each value of a field or key.

    `strategy.FIELD` is a field of the strategies that have it; a key of the experiment is one that
    an entry may set for itself. Keys joined by + get the same value.

    >>> swept = expand_sweep({"strategies": ["fbn", "gn"]}, "strategy.stats_momentum=0.1,none")
    >>> [entry.get("label", entry["name"]) for entry in swept["strategies"]]
    ['fbn stats_momentum=0.1', 'fbn stats_momentum=none', 'gn']
    >>> attacked = {"strategies": ["fbn"], "byzantine": 3}
    >>> swept = expand_sweep(attacked, "aggregator=mean,nnm > median")
    >>> [entry["label"] for entry in swept["strategies"]]
    ['fbn, mean', 'fbn, nnm > median']
    """
    key, equals, choices = text.partition("=")
    table, _, field = key.strip().partition(".")
    names = [name.strip() for name in key.split("+")]
    for name in names:
        if RENAMED.get(name) in OWN_SETTINGS:
            raise ConfigError(str(unknown("key", name, OWN_SETTINGS)))
    own = all(name in OWN_SETTINGS for name in names)
    if not equals or not (own or (table == "strategy" and field)):
        raise ConfigError(
            "--sweep takes strategy.FIELD=VALUE,VALUE,… or KEY=VALUE,VALUE,… with "
            f"{', '.join(OWN_SETTINGS)}, not {text!r}."
        )
    entries: list[dict[str, Any]] = []
    chosen_strategies = build_experiment(values).strategies
    known = {name for entry in chosen_strategies for name in entry.known_fields}
    if not own and field not in known:
        if RENAMED.get(field) in known:
            raise ConfigError(str(unknown("strategy field", field, known)))
        raise ConfigError(f"none of the chosen strategies has a field {field!r} to sweep.")
    for entry in chosen_strategies:
        plain = entry.model_dump(exclude_defaults=True)
        if entry.centralized if own else field not in entry.known_fields:
            entries.append(plain)
            continue
        for choice in _CHOICES.split(choices):
            value, word = parse_value(choice), choice.strip()
            told = f", {word}" if own and isinstance(value, str) else f" {names[0]}={word}"
            label = f"{entry.title}{told if own else f' {field}={word}'}"
            chosen = dict.fromkeys(names, value) if own else {field: value}
            entries.append({**plain, **chosen, "label": label})
    return {**values, "strategies": entries}


def build_experiment(values: Mapping[str, Any]) -> Experiment:
    """Return the checked experiment."""
    try:
        return Experiment.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_describe_error(e) for e in error.errors())) from None
    except UnknownNameError as error:
        raise ConfigError(str(error)) from None


def _describe_error(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return str(unknown("key", where, Experiment.model_fields))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "literal_error" and str(error["input"]) in RENAMED:
        return str(
            unknown(where, error["input"], get_args(Experiment.model_fields[where].annotation))
        )
    return f"{where} = {error['input']!r} is not valid: {error['msg'].lower()}."


def to_toml(experiment: Experiment) -> str:
    """Return the resolved experiment as TOML, ready to be run again."""
    return tomli_w.dumps(experiment.model_dump(exclude_none=True))
