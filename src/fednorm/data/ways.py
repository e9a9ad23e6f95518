"""The ways to get a data set, tried in order; if all fail, one error tells what was tried."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fednorm.data.cache import home
from fednorm.data.store import Arrays


class MissingDataError(OSError):
    """A data set that is neither here nor to be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Way:
    """One place to get a data set from; `get` raises OSError or ValueError with the reason."""

    place: str
    get: Callable[[], Arrays]


def first(name: str, ways: Iterable[Way], files: str, check: Callable[[Arrays], None]) -> Arrays:
    """Return what the first way that works gives.

    Args:
        name: the data set.
        ways: where to look, in order.
        files: the files that a user can put in place by hand.
        check: raises an error if what came is not what it should be.
    """
    tried = []
    for way in ways:
        try:
            arrays = way.get()
            check(arrays)
        except (OSError, ValueError) as error:
            tried.append(f"- {way.place}: {error}")
        else:
            return arrays
    raise MissingDataError(
        f"data set {name!r} is not here and could not be fetched. Tried:\n"
        + "\n".join(tried)
        + f"\nPut {files} into {home()}, or set data.root to the folder that holds it."
    )
