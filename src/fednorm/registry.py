"""Registries: a name, the class behind it, and how an entry is created from a name and fields.

Strategies, algorithms, aggregators, attacks, partitions, data sets and models all use it, so an
unknown name or field gets the same kind of answer everywhere.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from fednorm.errors import ConfigError, UnknownNameError

T = TypeVar("T")

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


class Registry(MutableMapping[str, type[T]], Generic[T]):
    """A mapping from names to classes; a class is imported when it is first asked for.

    Args:
        kind: what the entries are, for messages: "strategy".
        package: the package of their modules.
        entries: "module:Class" for each name, relative to the package.

    >>> codecs = Registry("decoder", "json", {"json": "decoder:JSONDecoder"})
    >>> list(codecs), codecs["json"].__name__
    (['json'], 'JSONDecoder')
    """

    def __init__(self, kind: str, package: str, entries: Mapping[str, str]) -> None:
        self.kind, self._package = kind, package
        self._paths = {name: f"{package}.{path}" for name, path in entries.items()}
        self._classes: dict[str, type[T]] = {}

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            module, _, cls = self._paths[name].partition(":")
            self._classes[name] = getattr(importlib.import_module(module), cls)
        return self._classes[name]

    def __setitem__(self, name: str, cls: type[T]) -> None:
        self._classes[name] = cls
        self._paths[name] = f"{cls.__module__}:{cls.__qualname__}"

    def __delitem__(self, name: str) -> None:
        del self._paths[name]
        self._classes.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __or__(self, other: "Registry[Any]") -> "Registry[Any]":
        both: Registry[Any] = Registry(self.kind, self._package, {})
        both._paths = {**self._paths, **other._paths}
        both._classes = {**self._classes, **other._classes}
        return both

    def locate(self, name: str) -> tuple[str, str]:
        """Return the module and the name of an entry's class, without importing it."""
        if name not in self:
            raise unknown(self.kind, name, self)
        module, _, cls = self._paths[name].partition(":")
        return module, cls

    def name_of(self, cls: type[T]) -> str | None:
        """Return the name under which a class is registered, if it is."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, known in self._paths.items() if known == path), None)

    def find(self, name: str) -> type[T]:
        """Return the class of an entry, or raise an error that lists the nearest names."""
        self.locate(name)
        return self[name]

    def create(self, name: str, fields: Mapping[str, Any]) -> T:
        """Create the entry `name` with the given fields."""
        cls = self.find(name)
        declared = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for field in fields:
            if field not in declared:
                raise unknown(f"field of {self.kind} {name!r}", field, declared)
        missing = [
            key
            for key, field in declared.items()
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and key not in fields
        ]
        if missing:
            raise ConfigError(f"{self.kind} {name!r} needs a value for {', '.join(missing)}.")
        try:
            return cls(**fields)
        except TypeError as error:  # a value of a type that a check of the class does not expect
            raise ConfigError(f"{self.kind} {name!r} with {dict(fields)}: {error}.") from error


def param(default: Any = dataclasses.MISSING, help: str = "") -> Any:  # noqa: A002 (reads as argparse does)
    """Declare a field of a registered dataclass together with the sentence that explains it."""
    return dataclasses.field(default=default, metadata={"help": help})


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
    hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnknownNameError(f"unknown {kind} {name!r};{hint} Known: {', '.join(names)}.")


def export_lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`: it imports a name when it is first asked for.

    Args:
        package: the package's `__name__`.
        places: the names of each module, such as `{"fednorm.core.moments": "Moments pool"}`.

    >>> export_lazily("fednorm", {"fednorm.errors": "ConfigError"})("ConfigError")
    <class 'fednorm.errors.ConfigError'>
    """
    modules = {name: module for module, names in places.items() for name in names.split()}

    def find_export(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find_export


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
        raise ConfigError(f"your own {kind} is 'package.module:function', but got {name!r}.")
    importlib.invalidate_caches()  # the file may be newer than the last look at the directory
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is theirs to see as it is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{kind} {name!r} needs module {module_name!r}, but there is none in {Path.cwd()} or "
            "among the installed packages; check its name or the directory you are in."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        raise unknown(f"function of module {module_name!r}", function_name, known)
    return function  # type: ignore[no-any-return]  # a callable of any signature


def check_allowed(kind: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a function that comes from outside unless its module is allowed.

    Args:
        kind: what it makes, "model" or "data set".
        name: a registered name, which may pass, or "package.module:function".
        allowed: modules and packages that the owner of this machine trusts.

    >>> check_allowed("model", "mlp", [])
    >>> check_allowed("model", "os:system", ["mypackage"])
    Traceback (most recent call last):
    fednorm.errors.ConfigError: model 'os:system' was sent to this machine, which allows functions \
of mypackage only; its owner can allow module 'os'.
    """
    if ":" not in name:
        return
    module, _, _ = name.partition(":")
    if _is_allowed(module, allowed):
        with importable_directory():
            # An allowed module imports others, whose functions are not meant.
            module = str(getattr(find_function(kind, name), "__module__", module))
    if not _is_allowed(module, allowed):
        known = f"functions of {', '.join(allowed)}" if allowed else "registered names"
        raise ConfigError(
            f"{kind} {name!r} was sent to this machine, which allows {known} only; its owner can "
            f"allow module {module!r}."
        )


def _is_allowed(module: str, allowed: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in allowed)


def list_arguments(function: Callable[..., Any], wanted: set[str]) -> set[str]:
    """Return the names that the function can be given as keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return wanted
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
