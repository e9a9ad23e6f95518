"""A registry is a dict from a name to a frozen dataclass; this is how an entry is made from text.

Strategies, algorithms, aggregators, partitions, data sets and models all use it, so an unknown
name or an unknown field gets the same kind of answer everywhere.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that is not in its registry; the message lists the nearest known ones."""


def param(default: Any = dataclasses.MISSING, help: str = "") -> Any:  # noqa: A002 (reads as argparse does)
    """Declare a field of a registered dataclass together with the sentence that explains it."""
    return dataclasses.field(default=default, metadata={"help": help})


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not known.

    >>> str(unknown("strategy", "fnb", ["fbn", "gn"]))
    "unknown strategy 'fnb'; did you mean 'fbn'? Known: fbn, gn."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnknownNameError(f"unknown {kind} {name!r};{hint} Known: {', '.join(names)}.")


def find(kind: str, registry: Mapping[str, type[T]], name: str) -> type[T]:
    """Return the class registered under `name`, or raise the error that lists the nearest names."""
    if name not in registry:
        raise unknown(kind, name, registry)
    return registry[name]


def create(kind: str, registry: Mapping[str, type[T]], name: str, fields: Mapping[str, Any]) -> T:
    """Make the entry `name` of a registry with the given fields."""
    cls = find(kind, registry, name)
    declared = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        if field not in {f.name for f in declared}:
            raise unknown(f"field of {kind} {name!r}", field, (f.name for f in declared))
    missing = [
        f.name
        for f in declared
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in fields
    ]
    if missing:
        raise ValueError(f"{kind} {name!r} needs a value for {', '.join(missing)}.")
    return cls(**fields)
