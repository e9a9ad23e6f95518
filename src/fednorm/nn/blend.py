"""Classes put together from two: the forward pass of one, with the other as its super().

Unlike other classes that are made while a program runs, they can be copied and pickled.
"""

from typing import Any, TypeAlias

from torch import nn

Class: TypeAlias = type[nn.Module]

_BLENDS: dict[tuple[Class, Class, str], Class] = {}
_PARTS: dict[Class, tuple[Class, Class]] = {}


def blend(outer: Class, inner: Class, name: str) -> Class:
    """Return the class of both: what `outer` asks of super(), it gets from `inner`."""
    key = (outer, inner, name)
    if key not in _BLENDS:
        fields = {"__reduce__": _reduce, "__module__": outer.__module__}
        _BLENDS[key] = cls = type(name, (outer, inner), fields)
        _PARTS[cls] = (outer, inner)
    return _BLENDS[key]


def parts(cls: Class) -> tuple[Class, Class] | None:
    """Return the two classes that a blend was made of, or None if it is none."""
    return _PARTS.get(cls)


def _reduce(self: nn.Module) -> tuple[Any, ...]:
    cls = type(self)
    state = self.__getstate__()  # type: ignore[no-untyped-call]  # object's own, or the user's
    return _remake, (*_PARTS[cls], cls.__name__), state


def _remake(outer: Class, inner: Class, name: str) -> nn.Module:
    cls = blend(outer, inner, name)
    return cls.__new__(cls)
