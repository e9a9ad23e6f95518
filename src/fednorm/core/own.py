"""A user's own function, named as "package.module:function": how it is found and called."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fednorm.core.registry import unknown


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
