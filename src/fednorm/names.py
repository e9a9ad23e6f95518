"""What a name means: near misses of known names, `module:attribute`, and entry points of packages.

A registry has fednorm's own names. Any other is looked up here: "mine:Mine" is an attribute of a
module, which may be a file of the current directory, and a package registers names as entry points
of the groups in GROUPS. What came over a network must pass `trust_only`.
"""

import contextlib
import difflib
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, reduce
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, EntryPoints
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fednorm.errors import ConfigError, UnknownNameError

log = logging.getLogger("fednorm")

# The group of entry points of each kind.
GROUPS = {
    "strategy": "fednorm.strategies",
    "algorithm": "fednorm.algorithms",
    "aggregator": "fednorm.aggregators",
    "pre-aggregation": "fednorm.pre_aggregators",
    "attack": "fednorm.attacks",
    "partition": "fednorm.partitions",
    "data set": "fednorm.datasets",
    "model": "fednorm.models",
    "loss": "fednorm.losses",
    "metric": "fednorm.metrics",
    "callback": "fednorm.callbacks",
}

# Names that were renamed before the first release; an old one is an error that tells the new one.
RENAMED = {
    "batch": "batch_size",
    "steps": "local_steps",
    "epochs": "local_epochs",
    "adapt": "adapt_statistics",
    "aggregate": "aggregator",
    "aggregate_statistics": "statistics_aggregator",
    "dropout": "client_dropout",
    "minimum_replies": "min_replies",
    "personal_memory": "client_state_memory",
    "newcomers": "unseen_init",
    "unseen": "unseen_clients",
    "momentum": "stats_momentum",  # of strategies; algorithms have a `momentum`
    "fit": "round_down",
    "lockstep": "merged",
    "cohort": "stacked",
    "meeting": "barrier",
    "workers": "processes",
    "centred_clipping": "centered_clipping",
}


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not known.

    >>> str(unknown("strategy", "fnb", ["fbn", "gn"]))
    "unknown strategy 'fnb'; did you mean 'fbn'? Known: fbn, gn."
    >>> str(unknown("key", "batch", ["batch_size", "rounds"]))
    "key 'batch' is now called 'batch_size'."
    """
    names = sorted(known)
    if RENAMED.get(name) in names:
        return UnknownNameError(f"{kind} {name!r} is now called {RENAMED[name]!r}.")
    near = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return UnknownNameError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}.")


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
        function = find_plugin(kind, name)
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


# Directories from which modules were imported that no other process would find.
user_directories: dict[str, None] = {}


def find_function(kind: str, name: str) -> Callable[..., Any]:
    """Import the module and return its function."""
    found = _import_attribute(kind, name, "function")
    if not callable(found):
        raise _unknown_attribute(name, "function")
    return found  # type: ignore[no-any-return]  # a callable of any signature


def find_plugin(kind: str, name: str, known: Iterable[str] = ()) -> Any:
    """Return what "module:attribute" names, or an entry point's name.

    Args:
        kind: a key of GROUPS, such as "loss".
        name: the name; one that is neither is an error that lists the nearest.
        known: fednorm's own names of this kind, for the error; an entry point cannot have them.
    """
    if ":" in name:
        is_class = kind in _CLASSES
        return _import_attribute(kind, name, "class") if is_class else find_function(kind, name)
    points = list_plugins(kind, known)
    if name not in points:
        raise unknown(kind, name, {*known, *points})
    point = points[name]
    try:
        return point.load()
    except Exception as error:  # whatever the package's code raises
        raise ConfigError(
            f"{kind} {name!r} of package {name_package(point)!r} cannot be used: importing "
            f"{point.value!r} fails with {type(error).__name__}: {error}. Update the package, or "
            "ask its author."
        ) from error


_CLASSES = {
    "class",
    "strategy",
    "algorithm",
    "aggregator",
    "pre-aggregation",
    "attack",
    "partition",
}


def list_plugins(kind: str, known: Iterable[str] = ()) -> Mapping[str, EntryPoint]:
    """Return the names that installed packages register; those that are `known` are refused.

    >>> list_plugins("decoder")
    {}
    """
    # What is installed depends on the path.
    return _read_plugins(kind, frozenset(known), tuple(sys.path)) if kind in GROUPS else {}


@cache
def _read_plugins(
    kind: str, known: frozenset[str], path: tuple[str, ...]
) -> Mapping[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(_list_entry_points(path).select(group=GROUPS[kind]), key=name_package):
        why = ""
        if not point.pattern.match(point.value) or not point.attr:
            why = f"as {point.value!r}, which is not 'module:attribute'"
        elif point.name in known:
            why = "which is a name of fednorm's own"
        elif ":" in point.name or not point.name.strip():
            why = "which is not a name"
        elif point.name in found:
            why = f"as {name_package(found[point.name])!r} does; name it {point.value!r}"
        if why:
            package = name_package(point)
            told = f"package {package!r} registers the {kind} {point.name!r}, {why}"
            warn_once(f"{told}: it is left out.")
        else:
            found[point.name] = point
    return found


@cache
def warn_once(text: str) -> None:
    """Warn of something that more than one run, or reading, meets; once."""
    log.warning("%s", text)


@cache  # reading what all packages register takes longer than anything that is done with it
def _list_entry_points(_path: tuple[str, ...]) -> Any:  # of either class, by Python's version
    try:
        return importlib.metadata.entry_points()
    except Exception:  # noqa: BLE001 (of a package whose list cannot be read)
        return EntryPoints(point for package in _list_readable() for point in package)


def _list_readable() -> Iterator[EntryPoints]:
    """Yield the entry points of each package, and warn of those that cannot be read."""
    for package in importlib.metadata.distributions():
        try:
            yield package.entry_points
        except Exception as error:  # noqa: BLE001 (as above)
            told = f"the entry points of package {package.name!r} cannot be read"
            warn_once(f"{told} and are left out: {error}")


def name_package(point: EntryPoint) -> str:
    """Return the name of the package that registers an entry point."""
    return point.dist.name if point.dist else "?"


def find_source(module: str) -> Path | None:
    """Return the file of a module, without importing anything, or None.

    >>> find_source("json.decoder").name
    'decoder.py'
    """
    first, *rest = module.split(".")
    try:
        with importable_directory():
            spec = find_spec(first)
    except ValueError:  # of a script
        return None
    for part in rest:
        places = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", places) if spec and places else None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def name_class(cls: type) -> str | None:
    """Return "module:Class" if another process can import it by that, or None.

    >>> from json import JSONDecoder
    >>> name_class(JSONDecoder)
    'json.decoder:JSONDecoder'
    """
    module, path = cls.__module__, cls.__qualname__
    if module == "__main__" or "<locals>" in path:
        return None
    known, source = getattr(sys.modules.get(module), "__file__", None), find_source(module)
    if not known or source is None or Path(known).resolve() != source.resolve():
        return None
    _note_directory(known)
    same = _get_attribute(sys.modules[module], path) is cls
    return f"{module}:{path}" if same else None


# Holds out a part of a data set, whose own name is checked in turn.
HOLD_OUT = "fednorm.experiment.comparison:hold_out"
_IMPORTED = ("",)
_trust: ContextVar[tuple[str, ...] | None] = ContextVar("trust", default=None)


@contextlib.contextmanager
def trust_only(allowed: Sequence[str] | None = None) -> Iterator[None]:
    """Let names in the block mean what the owner of this machine allows.

    Args:
        allowed: modules and packages; None stands for those that this process has imported.

    >>> with trust_only(["mypackage"]):
    ...     find_plugin("strategy", "os:system")
    Traceback (most recent call last):
    fednorm.errors.ConfigError: strategy 'os:system' was sent to this machine, which allows \
functions and classes of mypackage only; its owner can allow module 'os'.
    """
    token = _trust.set(_IMPORTED if allowed is None else tuple(allowed))
    try:
        yield
    finally:
        _trust.reset(token)


def check_allowed(kind: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a function that comes from outside unless its module is allowed.

    Args:
        kind: what it makes, "model" or "data set".
        name: a registered name, which may pass, or "package.module:function".
        allowed: modules and packages that the owner of this machine trusts.

    >>> check_allowed("model", "mlp", [])
    >>> check_allowed("model", "os:system", [])
    Traceback (most recent call last):
    fednorm.errors.ConfigError: model 'os:system' was sent to this machine, which allows \
registered names only; its owner can allow module 'os'.
    """
    if ":" in name:
        with trust_only(allowed):
            find_function(kind, name)


def _check_trust(kind: str, name: str, module: str) -> None:
    allowed = _trust.get()
    if allowed is None or name == HOLD_OUT:
        return
    if allowed is _IMPORTED:
        if module not in sys.modules:
            raise ConfigError(
                f"{kind} {name!r} is not fednorm's own, and nothing that a file or a message names "
                f"is imported; if you trust it, write `import {module}` first."
            )
    elif not any(f"{module}.".startswith(f"{one}.") for one in allowed):
        known = f"functions and classes of {', '.join(allowed)}" if allowed else "registered names"
        raise ConfigError(
            f"{kind} {name!r} was sent to this machine, which allows {known} only; its owner can "
            f"allow module {module!r}."
        )


def _import_attribute(kind: str, name: str, what: str) -> Any:
    module_name, _, path = name.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise ConfigError(f"your own {kind} is 'package.module:{what}', but got {name!r}.")
    _check_trust(kind, name, module_name)
    with importable_directory():
        module = _import_module(kind, name, module_name)
    found = _get_attribute(module, path)
    if found is None:
        raise _unknown_attribute(name, what)
    # An allowed module imports others, whose functions are not meant.
    _check_trust(kind, name, str(getattr(found, "__module__", module_name)))
    return found


def _import_module(kind: str, name: str, module: str) -> Any:
    if module not in sys.modules:
        importlib.invalidate_caches()  # the file may be newer than the last look at the directory
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is theirs to see as it is.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{kind} {name!r} needs module {module!r}, but there is none in {Path.cwd()} or "
            "among the installed packages; check its name or the directory you are in."
        ) from error
    _note_directory(getattr(found, "__file__", None))
    return found


def _note_directory(file: str | None) -> None:
    if file and Path(file).is_relative_to(Path.cwd()):
        user_directories[str(Path.cwd())] = None


def _get_attribute(module: Any, path: str) -> Any:
    """Return what a path such as "Outer.Inner" leads to, or None."""
    return reduce(lambda owner, part: getattr(owner, part, None), path.split("."), module)


def _unknown_attribute(name: str, what: str) -> UnknownNameError:
    place, _, path = name.partition(":")
    module = sys.modules[place]
    fits = inspect.isroutine if what == "function" else inspect.isclass
    known = [key for key, value in vars(module).items() if fits(value)]
    if what == "class":  # those that it defines rather than imports
        known = [key for key in known if vars(module)[key].__module__ == module.__name__]
    return unknown(f"{what} of module {place!r}", path, known)


def list_arguments(function: Callable[..., Any], wanted: set[str]) -> set[str]:
    """Return the names that the function can be given as keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return wanted
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
