"""Every error that fednorm raises on purpose; `FednormError` catches them all.

An error that also is a mistake in a value derives from `ValueError` or `TypeError` as well, so that
code which knows nothing of fednorm can catch it.

>>> import fednorm
>>> try:
...     fednorm.create_strategy("fnb")
... except fednorm.errors.FednormError as error:
...     print(str(error).partition("?")[0])
unknown strategy 'fnb'; did you mean 'fbn' or 'fixbn'
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar


class FednormError(Exception):
    """Base of all errors of this package; the command line prints its message.

    >>> issubclass(ConfigError, FednormError)
    True
    """


class ConfigError(FednormError, ValueError):
    """A configuration that cannot be run; the message says what to change."""


class UnknownNameError(FednormError, ValueError):
    """A name that is not in its registry; the message lists the nearest known ones."""


class ConversionError(FednormError, TypeError):
    """A layer that cannot be converted; the message names it."""


class WireError(FednormError, ValueError):
    """A message that cannot be read; the text says what was expected and what came."""


_LISTED = 4  # clients that a message names


class NonFiniteLossError(FednormError):
    """A client's loss became NaN or infinite."""

    REMEDY: ClassVar[str] = (
        "Lower the learning rate (algorithm.lr), clip gradients (algorithm.clip_norm = 1), or "
        "choose another strategy."
    )

    def __init__(self, client: int, round_: int, loss: float) -> None:
        super().__init__(f"the loss is {loss} in round {round_} at client {client}. {self.REMEDY}")
        self.client, self.round, self.loss = client, round_, loss

    def __reduce__(self) -> tuple[type, tuple[int, int, float]]:
        """Make the exception picklable."""
        return type(self), (self.client, self.round, self.loss)


class NoUsableReplyError(FednormError):
    """A round with fewer usable replies than it needs."""

    def __init__(
        self, round_: int, rejected: Sequence[Any], *, good: int = 0, reason: str = ""
    ) -> None:
        reasons = reason or "; ".join(self._list_reasons(rejected))
        few = f"only {good} usable repl{'y' if good == 1 else 'ies'}, fewer than it needs"
        why = reasons or ("no other arrived" if good else "none arrived")
        super().__init__(f"round {round_} has {few if good else 'no usable reply'} ({why}).")
        self.round, self.rejected, self.good = round_, tuple(rejected), good

    @staticmethod
    def _list_reasons(rejected: Sequence[Any]) -> Iterator[str]:
        """Yield each reason once, with the clients that were rejected for it."""
        for reason in dict.fromkeys(r.reason for r in rejected):
            clients = [str(r.client) for r in rejected if r.reason == reason]
            more = len(clients) - _LISTED
            named = ", ".join(clients[:_LISTED]) + (f" and {more} more" if more > 0 else "")
            yield f"client{'s' if len(clients) > 1 else ''} {named}: {reason}"


class CallbackError(FednormError):
    """A callback that failed; the message names it, the run and the round."""


class WorkerError(FednormError):
    """Worker processes that keep dying over the same work."""


class MissingFlowerError(ConfigError, ImportError):
    """Flower, an optional dependency, is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs Flower, which is not installed; in a checkout of fednorm: "
            'pip install ".[flower]".'
        )


class MissingPandasError(ConfigError, ImportError):
    """pandas, an optional dependency, is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "to_pandas needs pandas, which is not installed; in a checkout of fednorm: "
            'pip install ".[pandas]".'
        )


class DiskError(FednormError):
    """A file of a run that could not be written; the message says what is left, or what to do."""


class SimulationError(FednormError):
    """A simulation runtime that did not start."""


class NoNodesError(FednormError):
    """A run for which no node appeared."""


class ContractError(FednormError):
    """What a class of yours does that its kind must not do, and what to change."""


class TooFewClientsError(FednormError, ValueError):
    """A stage has fewer vectors than it needs to withstand its number of Byzantine clients."""

    def __init__(self, stage: str, needed: int, rows: int, f: int) -> None:
        super().__init__(
            f"{stage} with f={f} Byzantine clients needs at least {needed} vectors, but it gets "
            f"{rows}; lower f, choose another rule, or let more clients take part."
        )
        self.stage, self.needed, self.rows, self.f = stage, needed, rows, f

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int]]:
        """Make the exception picklable."""
        return type(self), (self.stage, self.needed, self.rows, self.f)


class DamagedDataError(FednormError, ValueError):
    """Data that do not match their checksum."""


class MissingDataError(FednormError, OSError):
    """A data set that is not cached and cannot be downloaded; the message says what to do."""
