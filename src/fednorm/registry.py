"""A registry is a dict from a name to a frozen dataclass; this is how an entry is made from text.

Strategies, algorithms, aggregators, partitions, data sets and models all use it, so an unknown
name or an unknown field gets the same kind of answer everywhere.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fednorm.errors import UnknownNameError

T = TypeVar("T")


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


def call_user_function(
    kind: str, name: str, offered: Mapping[str, Any], fields: Mapping[str, Any]
) -> Any:
    """Call the user's function and return what it returns.

    Args:
        kind: what it makes, "model" or "data set".
        name: "package.module:function"; the current directory is importable.
        offered: the arguments that are passed if the function takes them.
        fields: the arguments that the user sets, all of which it must take.
    """
    with importable_directory():
        function = find_function(kind, name)
        accepted = list_arguments(function, {*offered, *fields})
        for field in fields:
            if field not in accepted:
                raise unknown(f"argument of {kind} {name!r}", field, accepted)
        chosen = {key: value for key, value in offered.items() if key in accepted}
        return function(**{**chosen, **fields})


@contextlib.contextmanager
def importable_directory() -> Iterator[None]:
    """Let modules of the current directory be imported, within the block only."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


def find_function(kind: str, name: str) -> Callable[..., Any]:
    """Import the module and return its function."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.startswith("."):
        raise ValueError(f"a {kind} of your own is 'package.module:function', but got {name!r}.")
    importlib.invalidate_caches()  # the file may be newer than the last look at the directory
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is theirs to see as it is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{kind} {name!r} needs module {module_name!r}, but there is none in {Path.cwd()} or "
            "among the installed packages; check its name or the directory you are in."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        raise unknown(f"function of module {module_name!r}", function_name, known)
    return function  # type: ignore[no-any-return]  # a callable of any signature


def list_arguments(function: Callable[..., Any], wanted: set[str]) -> set[str]:
    """Return the names that the function can be given as keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return wanted
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
