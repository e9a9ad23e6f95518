"""Flower, an optional dependency: clients on its nodes, and fednorm in a user's own Flower app."""

from collections.abc import Iterator
from contextlib import contextmanager

from fednorm.engines.base import EngineRun, Progress, RoundResult
from fednorm.errors import MissingFlowerError


class FlowerEngine:
    """Clients on Flower's nodes; `run.remote` reaches them."""

    name = "flower"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why nodes cannot train the clients, or None."""
        if run.remote is None:
            return "engine 'flower' needs a run that its nodes can build from a description"
        return run.remote.why_not(run)

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        if run.remote is None:
            raise ValueError(self.why_not(run))
        return run.remote.rounds(run, start)


@contextmanager
def require_flower(what: str) -> Iterator[None]:
    """Raise MissingFlowerError for `what` if an import in the block fails for lack of Flower."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"flwr", "cryptography"}:
            raise
        raise MissingFlowerError(what) from error
