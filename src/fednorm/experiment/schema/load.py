"""Experiments from TOML files, `--set`, sweeps and objects in Python; unknown keys get a hint."""

import dataclasses
import inspect
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError

from fednorm.aggregators import AGGREGATORS, format_aggregator
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import (
    OWN_SETTINGS,
    THREATS,
    Spec,
    check_number,
    flatten_choices,
    merge_tables,
    read_entry,
)
from fednorm.models import MODELS
from fednorm.names import RENAMED, unknown
from fednorm.registry import Registry, format_call, held, split_outside
from fednorm.strategies import STRATEGIES

_OPTIONS = {"workers", "out"}  # of how an experiment is run
_CONFIGS: Mapping[str, tuple[Registry[Any], str]] = {
    "model": (MODELS, "build"),
    "data": (DATASETS, "load"),
}
_OBJECTS: Mapping[str, Registry[Any]] = {
    "strategies": STRATEGIES,
    "algorithm": ALGORITHMS,
    "attack": ATTACKS,
    "partition": PARTITIONS,
    "aggregator": AGGREGATORS,
    "statistics_aggregator": AGGREGATORS,
}


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
            inner = read_entry(inner) if isinstance(inner, str) else dict(inner)
            value = parse_value(text)
            named = field == "name" and isinstance(value, str)
            result[table] = {**inner, **(read_entry(value) if named else {field: value})}
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
    """Replace each strategy of the values by one entry for each value of a key.

    `strategy.FIELD` is a field of the strategies that have it, `algorithm.lr` (or `lr`) one of
    another table; any other key is one that an entry may set for itself. Keys joined by + get the
    same value.

    >>> swept = expand_sweep({"strategies": ["fbn", "gn"]}, "strategy.stats_momentum=0.1,none")
    >>> [entry.get("label", entry["name"]) for entry in swept["strategies"]]
    ['fbn stats_momentum=0.1', 'fbn stats_momentum=none', 'gn']
    >>> swept = expand_sweep({"strategies": ["fbn"]}, "partition=gamma=0,iid")
    >>> [entry["label"] for entry in swept["strategies"]]
    ['fbn, gamma=0', 'fbn, iid']
    """
    return sweep_key(values, *parse_choices(text))


def parse_choices(text: str, option: str = "--sweep") -> tuple[str, list[Any]]:
    """Read `KEY=VALUE,VALUE`.

    >>> parse_choices("lr=0.01,0.1"), parse_choices("algorithm.milestones=[0.5,0.75],[0.3]")
    (('lr', [0.01, 0.1]), ('algorithm.milestones', [[0.5, 0.75], [0.3]]))
    """
    key, _, choices = text.partition("=")
    parts = split_outside(choices, ",")
    if not all(part.strip() for part in (key, *parts)):
        raise ConfigError(f"{option} takes KEY=VALUE,VALUE,…, not {text!r}.")
    return key.strip(), [parse_value(part) for part in parts]


def sweep_key(values: Mapping[str, Any], key: str, choices: Sequence[Any]) -> dict[str, Any]:
    """Replace each strategy by one entry for each choice of a key; see `expand_sweep`."""
    if not isinstance(choices, list | tuple) or not choices:
        raise ConfigError(f"the values of {key} are a list, not {choices!r}.")
    entries: list[dict[str, Any]] = []
    strategies = build_experiment(values).strategies
    names = [name.strip() for name in key.split("+")]
    _check_swept(names, {name for entry in strategies for name in entry.known_fields})
    table, _, field = names[0].rpartition(".")
    check_number(len(strategies) * len(choices))
    for entry in strategies:
        plain = entry.model_dump(exclude_defaults=True)
        fixed = (
            field not in entry.known_fields
            if table == "strategy"
            else (entry.centralized and all(name in THREATS for name in names))
        )
        if fixed:
            entries.append(plain)
            continue
        for value in choices:
            word = _name_choice(value)
            told = f", {word}" if isinstance(value, str) and not table else f" {field}={word}"
            changes = [_nest_choice(values, name, value) for name in names]
            chosen = reduce(merge_tables, changes, plain)
            entries.append({**chosen, "label": f"{entry.title}{told}"})
    return {**values, "strategies": entries}


def _check_swept(names: Sequence[str], fields: Collection[str]) -> None:
    """Raise an error for a key that cannot be swept."""
    for name in names:
        table, _, field = name.rpartition(".")
        if table == "strategy":
            if field not in fields and RENAMED.get(field) in fields:
                raise ConfigError(str(unknown("strategy field", field, fields)))
            if field not in fields:
                raise ConfigError(f"none of the chosen strategies has a field {field!r} to sweep.")
        elif (table or field) in Experiment.model_fields and (table or field) not in OWN_SETTINGS:
            raise ConfigError(
                f"{name} is the same for all runs of an experiment: no sweep sets it."
            )
        elif name != "lr" and (table or field) not in OWN_SETTINGS:
            raise ConfigError(str(unknown("key", name, OWN_SETTINGS)))


def _name_choice(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(part) for part in value.values())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nest_choice(values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a choice as an entry says it; another algorithm keeps the learning rate."""
    table, _, field = name.rpartition(".")
    if table == "privacy":  # an entry sets it as a whole
        return {table: {**values.get(table, {}), field: value}}
    if name == "algorithm" and isinstance(value, str):
        before = values.get(name, Experiment.model_fields[name].default)
        return {name: merge_tables({name: before}, {name: read_entry(value)})[name]}
    return {table: {field: value}} if table and table != "strategy" else {field: value}


def describe_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose objects, such as a strategy, are names with fields.

    >>> from fednorm.strategies import create_strategy
    >>> describe_objects({"strategies": [create_strategy("gn", groups=4), "ln"]})
    {'strategies': [{'name': 'gn', 'groups': 4}, 'ln']}
    """
    plain = {key: _describe_object(key, value) for key, value in values.items()}
    given, made = values.get("strategies"), plain.get("strategies")
    if isinstance(made, list) and isinstance(given, list | tuple):
        names = Counter(one["name"] if isinstance(one, Mapping) else one for one in made)
        for i, one in enumerate(made):
            if isinstance(given[i], str | Mapping):
                continue
            repeated = names[one["name"]] > 1
            short = {**one, "name": type(given[i]).__name__} if one["name"] in held else one
            if repeated or short is not one:
                label = format_call(short) if repeated else short["name"]
                made[i] = {**one, "label": label}
    return plain


def _describe_object(key: str, value: Any) -> Any:
    key = key.rpartition(".")[2]
    if type(value) is dict or (isinstance(value, Mapping) and key != "data"):  # no DatasetDict
        return {inner: _describe_object(inner, part) for inner, part in value.items()}
    listed = list if key in _CONFIGS else (list, tuple)  # a tuple of data is arrays (x, y)
    if isinstance(value, listed) and key in {*_OBJECTS, *_CONFIGS}:
        return [_describe_object(key, part) for part in value]
    if key in _CONFIGS:
        registry, method = _CONFIGS[key]
        ours = dataclasses.is_dataclass(value) and hasattr(value, method) and not callable(value)
        return registry.describe(value) if ours else value
    if key not in _OBJECTS or value is None or isinstance(value, str | Spec):
        return value
    if isinstance(value, type):
        raise ConfigError(
            f"{key}: {value.__name__} is a class; give an object, {value.__name__}()."
        )
    if _OBJECTS[key] is AGGREGATORS:
        return format_aggregator(value)
    table = _OBJECTS[key].describe(value)
    return format_call(table) if key == "partition" else table


def find_held(values: Any) -> str | None:
    """Return the name of an object in settings that no other process can make, or None."""
    return next(_list_held(values), None)


def _list_held(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        for value in values.values():
            yield from _list_held(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _list_held(value)
    elif isinstance(values, str):
        yield from (held[name].__name__ for name in held if name in values)


def build_experiment(values: Mapping[str, Any]) -> Experiment:
    """Return the checked experiment; a table `sweep` has a list of values for each of its keys.

    >>> swept = build_experiment({"strategies": ["fbn"], "sweep": {"algorithm.lr": [0.01, 0.1]}})
    >>> [entry.title for entry in swept.strategies]
    ['fbn lr=0.01', 'fbn lr=0.1']
    """
    plain = {key: value for key, value in values.items() if key != "sweep"}
    try:
        swept = flatten_choices(values.get("sweep", {}))
    except ValueError as error:
        raise ConfigError(f"sweep: {error}") from None
    for key, choices in swept.items():
        plain = sweep_key(plain, key, choices)
    try:
        return Experiment.model_validate(plain)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe_error(e) for e in error.errors())) from None
    except UnknownNameError as error:
        raise ConfigError(str(error)) from None


def _describe_error(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _describe_unknown_key(*map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "literal_error" and str(error["input"]) in RENAMED:
        return str(
            unknown(where, error["input"], get_args(Experiment.model_fields[where].annotation))
        )
    return f"{where} = {error['input']!r} is not valid: {error['msg'].lower()}."


def _describe_unknown_key(key: str, *inside: str) -> str:
    """Name the keys of the table that the key is in, or the table that has such a key."""
    if inside:
        table, *_ = get_args(Experiment.model_fields[key].annotation)
        return str(unknown(f"key of the table [{key}]", inside[-1], table.model_fields))
    if key in _OPTIONS:
        return f"{key!r} is no key of an experiment, but an option: --{key}, in Python {key}=…"
    for name, known in (("algorithm", ALGORITHMS), ("strategy", STRATEGIES)):
        if any(key in inspect.signature(cls).parameters for cls in known.values()):
            return f"unknown key {key!r}; did you mean '{name}.{key}'?"
    return str(unknown("key", key, Experiment.model_fields))


def to_toml(experiment: Experiment) -> str:
    """Return the resolved experiment as TOML, ready to be run again."""
    return tomli_w.dumps(experiment.model_dump(exclude_none=True))
