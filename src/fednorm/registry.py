"""Registries: a name, the class behind it, and how an entry is created from a name and fields.

Strategies, algorithms, aggregators, attacks, partitions, data sets and models all use it, so an
unknown name or field gets the same kind of answer everywhere. A name that is not fednorm's own may
be an entry point of a package, or "module:Class"; see names.py.
"""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from fednorm.errors import ConfigError, UnknownNameError
from fednorm.names import find_plugin, list_plugins, name_class, unknown
from fednorm.objects import OBJECT

T = TypeVar("T")

_DIGITS = 12  # of a hash
held: dict[str, type] = {}  # classes that only this process has, by such names
_CALL = re.compile(r"\s*([^\s()=,]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_WORDS = {"none": None, "true": True, "false": False}
_GUIDE = "docs/plugins.md has an example"


class Registry(MutableMapping[str, type[T]], Generic[T]):
    """A mapping from names to classes; a class is imported when it is first asked for.

    It iterates over fednorm's own names. Other names are found as well: those of `list_plugins`,
    and "module:Class".

    Args:
        kind: what the entries are, for messages: "strategy".
        package: the package of their modules.
        entries: "module:Class" for each name, relative to the package.
        interface: what a class from outside must derive from, or if it is a protocol have the
            members of, as "module:Class".

    >>> codecs = Registry("decoder", "json", {"json": "decoder:JSONDecoder"})
    >>> list(codecs), codecs["json"].__name__
    (['json'], 'JSONDecoder')
    """

    def __init__(
        self, kind: str, package: str, entries: Mapping[str, str], interface: str = ""
    ) -> None:
        self.kind, self._package, self.interface = kind, package, interface
        self._paths = {name: f"{package}.{path}" for name, path in entries.items()}
        self._classes: dict[str, type[T]] = {}
        self._parts: tuple[Registry[Any], ...] = (self,)

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._paths:
            try:
                return self._find_outside(name)
            except UnknownNameError:
                raise KeyError(name) from None
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
        if name in self._paths or name in held:
            return True
        if not isinstance(name, str) or ":" not in name:
            return name in self.list_plugins()
        try:
            return bool(self._find_outside(name))
        except ValueError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __or__(self, other: "Registry[Any]") -> "Registry[Any]":
        both: Registry[Any] = Registry(self.kind, self._package, {})
        both._paths = {**self._paths, **other._paths}
        both._classes = {**self._classes, **other._classes}
        both._parts = (*self._parts, *other._parts)
        return both

    def has_own(self, name: str) -> bool:
        """Return whether a name is fednorm's own."""
        return name in self._paths

    def list_plugins(self) -> Mapping[str, EntryPoint]:
        """Return the names that installed packages register."""
        found: dict[str, EntryPoint] = {}
        for part in self._parts:
            found |= list_plugins(part.kind, part)
        return {name: point for name, point in found.items() if name not in self._paths}

    def list_names(self) -> list[str]:
        """Return fednorm's own names and those of installed packages."""
        return [*self._paths, *self.list_plugins()]

    def locate(self, name: str) -> tuple[str, str]:
        """Return the module and the name of an entry's class, without importing it."""
        if not self.has_own(name) and ":" in name:
            module, _, cls = name.partition(":")
            return module, cls
        if not self.has_own(name) and (point := self.list_plugins().get(name)):
            return point.module, point.attr
        if not self.has_own(name):
            raise unknown(self.kind, name, self.list_names())
        module, _, cls = self._paths[name].partition(":")
        return module, cls

    def name_of(self, cls: type[T]) -> str | None:
        """Return the name by which a class is found: its own, "module:Class", or None."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        own = (name for name, known in self._paths.items() if known == path)
        points = self.list_plugins() if not cls.__module__.startswith(self._package) else {}
        ours = (name for name, point in points.items() if point.value == path)
        return next(own, None) or next(ours, None) or name_class(cls)

    def find(self, name: str) -> type[T]:
        """Return the class of an entry, or raise an error that lists the nearest names."""
        return self[name] if self.has_own(name) else self._find_outside(name)

    def _find_outside(self, name: str) -> type[T]:
        """Return a class that is not fednorm's own, with the members of the interface."""
        if name in held:
            return held[name]
        if name.startswith(OBJECT):
            raise ConfigError(
                f"the {self.kind} {name.removeprefix(OBJECT)!r} was given as an object in Python; "
                'give it to fednorm.compare again, or name its class as "module:Class".'
            )
        part = self
        if len(self._parts) > 1:  # of a registry of several kinds
            fits = (part for part in self._parts if name in list_plugins(part.kind, part))
            part = next(fits, self._parts[0])
        found = find_plugin(part.kind, name, part)
        part.check_class(name, found)
        return found  # type: ignore[no-any-return]  # it was checked

    def check_class(self, name: str, cls: Any) -> None:
        """Raise ConfigError unless a class can be an entry."""
        told = f"{self.kind} {name!r}"
        if not inspect.isclass(cls):
            raise ConfigError(f"{told} is {type(cls).__name__} {cls!r:.60}, not a class; {_GUIDE}.")
        if problem := self._find_problem(cls):
            raise ConfigError(f"{told} {problem}; {_GUIDE}.")

    def _find_problem(self, cls: type) -> str:
        """Return what a class lacks, or an empty text."""
        if self.interface:
            module, _, path = self.interface.partition(":")
            base = getattr(importlib.import_module(module), path)
            protocol = getattr(base, "_is_protocol", False)
            if not protocol and not issubclass(cls, base):
                return f"does not derive from {path}: from {module} import {path}"
            missing = set(getattr(cls, "__abstractmethods__", ()))
            if protocol:
                wanted = {*vars(base), *getattr(base, "__annotations__", ())}
                missing |= {m for m in wanted if m[0] != "_" and not hasattr(cls, m)}
            if missing:
                return f"lacks {', '.join(sorted(missing))}, of which {module} tells what it does"
        own = vars(cls).get("__dataclass_params__")
        if own is None:
            return "is no dataclass: write @dataclass(frozen=True) above it"
        return "" if own.frozen else "can change: write @dataclass(frozen=True) above it"

    def describe(self, entry: T) -> dict[str, Any]:
        """Return an entry as a table of a configuration: its name, and fields that are set.

        A class that no other process can import is held by this one under a name with a hash of
        its source.
        """
        cls = type(entry)
        self.check_class(cls.__name__, cls)
        name = self.name_of(cls)
        if name is None:
            name = f"{OBJECT}{cls.__name__}@{_hash_source(cls)}"
            held[name] = cls
        return {"name": name, **dict(_list_set_fields(entry))}

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


def is_config(registry: Registry[Any], name: str, method: str) -> bool:
    """Return whether a name from outside is a class with a method, and no function."""
    found = held.get(name) or find_plugin(registry.kind, name, registry)
    return inspect.isclass(found) and hasattr(found, method)


def _hash_source(cls: type) -> str:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # typed into a session
        source = repr([(key, _list_code(value)) for key, value in sorted(vars(cls).items())])
    return hashlib.sha256(source.encode()).hexdigest()[:_DIGITS]


def _list_code(value: Any) -> Any:
    """Return what a function does, without addresses, which differ from session to session."""
    code = getattr(value, "__code__", None)
    if code is None:
        return value if isinstance(value, bool | int | float | str) else None
    plain = [one for one in code.co_consts if not inspect.iscode(one)]
    return code.co_code, code.co_names, plain


def _list_set_fields(entry: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass that are not at their defaults, as plain values."""
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init and (type(value) is not type(default) or value != default):
            told = f"{field.name} of {type(entry).__name__}"
            yield field.name, "none" if value is None else _to_plain(told, value)


def _to_plain(told: str, value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_to_plain(told, part) for part in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _to_plain(told, part) for key, part in value.items()}
    raise ConfigError(
        f"{told} is {type(value).__name__} {value!r:.60}, which no configuration can hold; fields "
        "are numbers, texts, and lists and tables of them."
    )


# Entries that are written as text: "trimmed_mean(f=2)".


def parse_call(text: str, example: str = "f=2") -> tuple[str, dict[str, Any]] | None:
    """Read a name with fields in brackets; None if the text is something else.

    An error shows the `example` of a field.

    >>> parse_call("mine:Median(f=2, start=half)")
    ('mine:Median', {'f': 2, 'start': 'half'})
    """
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    name, inner = match.groups()
    fields: dict[str, Any] = {}
    for part in filter(str.strip, split_outside(inner or "", ",")):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or field in fields:
            raise ConfigError(
                f"{name} got {part.strip()!r}, which is not a field or is set twice; "
                f"write for example '{name}({example})'."
            )
        fields[field] = _parse_value(value)
    return name, fields


def format_call(entry: Mapping[str, Any]) -> str:
    """Return a table as text that `parse_call` reads.

    >>> format_call({"name": "mine:Median", "f": 2, "start": "half"})
    'mine:Median(f=2, start=half)'
    """
    fields = ", ".join(f"{key}={value}" for key, value in entry.items() if key != "name")
    return f"{entry['name']}({fields})" if fields else str(entry["name"])


def _parse_value(text: str) -> Any:
    """Parse a number, a truth value or None; return any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return _WORDS.get(text, text)


def split_outside(text: str, separator: str) -> list[str]:
    """Split text where the separator is not in brackets.

    >>> split_outside("a(b=1, c=(2, 3)), d", ",")
    ['a(b=1, c=(2, 3))', ' d']
    """
    parts = [""]
    for piece in re.split(f"({re.escape(separator)})", text):
        inside = sum(parts[-1].count(c) for c in "([") > sum(parts[-1].count(c) for c in ")]")
        if piece == separator and not inside:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def param(default: Any = dataclasses.MISSING, help: str = "") -> Any:  # noqa: A002 (reads as argparse does)
    """Declare a field of a registered dataclass together with the sentence that explains it."""
    return dataclasses.field(default=default, metadata={"help": help})


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
