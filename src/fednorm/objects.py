"""Objects that a user gives in Python, held while they are used.

A configuration is text: of an object it says a name, which begins with `object:`, and a hash of its
content. Whoever needs the object finds it here by that; worker processes are given the same ones.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import Any

from fednorm.errors import ConfigError

OBJECT = "object:"  # begins the name of what no configuration can make
_DIGITS = 12  # of a hash

# Of this thread: a comparison in another one has its own.
_held: ContextVar[Mapping[str, Any]] = ContextVar("held", default=MappingProxyType({}))


@contextmanager
def hold_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Hold objects, by their content, within the block.

    >>> with hold_objects({"0a1b": print}):
    ...     find_object("loss", "object:print", "0a1b") is print
    True
    """
    token = keep_objects(objects)
    try:
        yield
    finally:
        _held.reset(token)


def keep_objects(objects: Mapping[str, Any]) -> Token[Mapping[str, Any]]:
    """Hold objects as long as this process lives, as a worker process does."""
    return _held.set({**_held.get(), **objects})


def list_held() -> dict[str, Any]:
    """Return the objects that are held, by their content."""
    return dict(_held.get())


def find_object(kind: str, name: str, content: str) -> Any:
    """Return an object that is held; a recorded configuration alone cannot make it."""
    if content not in (held := _held.get()):
        raise ConfigError(
            f"the {kind} {name.removeprefix(OBJECT)!r} was given as an object in Python; give it "
            'to fednorm.compare again, or name it as "package.module:function".'
        )
    return held[content]


def hash_parts(parts: Iterable[bytes]) -> str:
    """Return a short hash of several parts.

    >>> hash_parts([b"ab", b"c"]) == hash_parts([b"a", b"bc"])
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:_DIGITS]
