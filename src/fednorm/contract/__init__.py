"""The contract: what every strategy, aggregator, partition and so on promises, as checks.

The tests call the checks for all that is registered, and `fednorm check mine:Mine` for your own.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.contract.combining import AGGREGATOR_CHECKS, ATTACK_CHECKS
from fednorm.contract.components import (
    LOSS_CHECKS,
    METRIC_CHECKS,
    MODEL_CHECKS,
    PARTITION_CHECKS,
)
from fednorm.contract.training import ALGORITHM_CHECKS, PROCESS_CHECKS, STRATEGY_CHECKS
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS, create_partition
from fednorm.errors import ConfigError, ContractError, FednormError
from fednorm.experiment.callbacks import CALLBACKS
from fednorm.experiment.schema.specs import create_entry
from fednorm.models import MODELS, create_model
from fednorm.names import find_plugin, list_plugins, unknown
from fednorm.registry import Registry, parse_call
from fednorm.strategies import STRATEGIES
from fednorm.system import limit_threads

Check: TypeAlias = Callable[[Any], None]  # its docstring is the promise

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "strategy": STRATEGY_CHECKS,
    "algorithm": ALGORITHM_CHECKS,
    "aggregator": AGGREGATOR_CHECKS,
    "pre-aggregation": AGGREGATOR_CHECKS,
    "attack": ATTACK_CHECKS,
    "partition": PARTITION_CHECKS,
    "model": MODEL_CHECKS,
    "loss": LOSS_CHECKS,
    "metric": METRIC_CHECKS,
}
_KINDS: tuple[Registry[Any], ...] = (
    *(STRATEGIES, ALGORITHMS, AGGREGATORS, PRE_AGGREGATORS, ATTACKS, PARTITIONS, MODELS),
)
_REGISTRIES: Mapping[str, Registry[Any]] = {registry.kind: registry for registry in _KINDS}
_UNCHECKED: Mapping[str, Registry[Any]] = {r.kind: r for r in (DATASETS, CALLBACKS)}
_AFTER = "mean"  # the rule that a pre-aggregation is checked with


@dataclass(frozen=True)
class Finding:
    """One promise, and what breaks it, if anything."""

    promise: str
    problem: str = ""


def examine_plugin(text: str, kind: str | None = None, *, fast: bool = False) -> Iterator[Finding]:
    """Yield what the checks find of "module:Class", with fields in brackets if it needs some.

    Args:
        text: the name, such as "mine:Mine(alpha=0.5)"; or one of fednorm's own.
        kind: what it is, such as "strategy"; guessed from the class if not given.
        fast: leave out what starts worker processes.

    >>> {finding.problem for finding in examine_plugin("median", "aggregator")}
    {''}
    """
    kind = kind or guess_kind(text)
    if kind in _UNCHECKED:
        raise ConfigError(f"a {kind} has no promises to check; these have: {', '.join(CHECKS)}.")
    if kind not in CHECKS:
        raise unknown("kind", kind, CHECKS)
    promise = "is complete, and a frozen dataclass where one is needed"
    try:
        subject = _make_subject(kind, text)
    except (FednormError, ValueError, TypeError) as error:
        if not _find(kind, text):
            raise  # there is no such class
        yield Finding(promise, str(error))
        return
    yield Finding(promise)
    slow = PROCESS_CHECKS if kind in {"strategy", "algorithm"} and not fast else ()
    with limit_threads(1):  # of tiny models
        yield from (run_check(check, subject) for check in (*CHECKS[kind], *slow))


def run_check(check: Check, subject: Any) -> Finding:
    """Return what a check finds."""
    promise = str(inspect.getdoc(check)).partition("\n")[0].removesuffix(".")
    try:
        check(subject)
    except ContractError as error:
        return Finding(promise, str(error))
    except Exception as error:  # noqa: BLE001 (whatever the author's code raises)
        where = inspect.trace()[-1]
        told = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return Finding(promise, told)
    return Finding(promise)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    called = parse_call(text.partition("=")[0] if "(" not in text else text)
    if called is None:
        raise ConfigError(f"{text!r} is not 'module:Class', nor 'module:Class(field=1)'.")
    return called


def _find(kind: str, text: str) -> Any:
    name = _split(text)[0]
    if kind in _REGISTRIES and _REGISTRIES[kind].has_own(name):
        return _REGISTRIES[kind].find(name)
    return find_plugin(kind, name, _REGISTRIES.get(kind, ()))


def _make_subject(kind: str, text: str) -> Any:
    """Return what the checks of a kind get: an entry, or what makes one."""
    name, fields = _split(text)
    if kind in {"aggregator", "pre-aggregation"}:
        _REGISTRIES[kind].find(name)
        return f"{text} > {_AFTER}" if kind == "pre-aggregation" else text
    if kind == "partition":
        create_partition(text)
        return text
    if kind == "model":
        return lambda shape, classes, seed: create_model(name, shape, classes, seed, **fields)
    if kind in {"loss", "metric"}:
        found = _find(kind, text)
        return found(**fields) if inspect.isclass(found) else found
    return create_entry(_REGISTRIES[kind], name, fields)


# What a class derives from, and else what it has.
_BASES = {
    "Strategy": "strategy",
    "Attack": "attack",
    "PreAggregator": "pre-aggregation",
    "Aggregator": "aggregator",
    "SGD": "algorithm",
    "Partition": "partition",
    "Module": "model",
    "Callback": "callback",
}
_MEMBERS = {"split": "partition", "build": "model", "apply": "algorithm", "rule": "strategy"}


def guess_kind(text: str) -> str:
    """Return the kind of a class from what it derives from, or from its members.

    >>> guess_kind("fednorm.strategies.gn:GN"), guess_kind("fednorm.models.small:Mlp")
    ('strategy', 'model')
    """
    name = _split(text)[0]
    if ":" in name:
        kinds = set(_guess_from_class(find_plugin("class", name)))
    else:
        known = {kind: set(list_plugins(kind)) for kind in ("loss", "metric")}
        known |= {k: set(one.list_names()) for k, one in {**_REGISTRIES, **_UNCHECKED}.items()}
        kinds = {kind for kind, names in known.items() if name in names}
        if not kinds:
            raise unknown("name", name, set().union(*known.values()))
    if len(kinds) == 1:
        return kinds.pop()
    raise ConfigError(
        f"what {name!r} is does not show; say it with --kind, one of {', '.join(CHECKS)}."
    )


def _guess_from_class(found: Any) -> list[str]:
    if not inspect.isclass(found):
        takes = inspect.signature(found).parameters if callable(found) else {}
        return ["model"] if {"shape", "classes"} & set(takes) else []
    ours = [cls for cls in found.__mro__ if cls.__module__.startswith(("fednorm.", "torch.nn"))]
    derived = [_BASES[cls.__name__] for cls in ours if cls.__name__ in _BASES]
    return derived[:1] or [kind for member, kind in _MEMBERS.items() if hasattr(found, member)]


__all__ = ["CHECKS", "Finding", "examine_plugin", "guess_kind", "run_check"]
