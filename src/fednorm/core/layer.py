"""Rules, which say how a layer treats a training batch, and the interface of layers that follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from fednorm.core.exchange import Exchange, Solo
from fednorm.core.messages import LayerStats, RunningStats

Statistics: TypeAlias = Literal["average", "pool"]
Calibration: TypeAlias = Literal["never", "evaluation"]  # before what it takes place


@dataclass(slots=True)
class RoundContext:
    """What all layers of a model share during one round of one client."""

    exchange: Exchange = field(default_factory=Solo)
    step: int = -1  # which mini-batch of the round, counted from 0; -1 outside of training
    samples: int = 0  # of that mini-batch; 0 if unknown: layers then count the rows they see
    examples: int = 0  # the client's weight in averages
    client_sizes: tuple[int, ...] = ()  # as in `Batches`


@dataclass(frozen=True, slots=True)
class NormRule:
    """How a layer treats a training batch; called as `rule(layer, x)`.

    Args:
        normalize_with: the statistics that a batch is normalised with: its own ("batch"; where the
            batches of several clients are merged, those of each client's part), the shared running
            ones, which are constants ("shared"), those of all clients' batches ("synchronized"),
            or a function of several of these that cannot tell clients apart ("mixed").
        tracks: whether the layer's running statistics follow its batches, as in torch.
        reports: what the layer reports after a round: the client's running statistics ("running");
            the moments of its inputs, weighted as running statistics would weigh them ("moments");
            the moments of all inputs of a calibration pass, each of the same weight ("totals"); the
            mean over that pass's batches of their statistics ("averages"); or "nothing".
        normalize: the function that does it.
    """

    normalize_with: Literal["batch", "shared", "synchronized", "mixed"]
    tracks: bool
    reports: Literal["running", "moments", "totals", "averages", "nothing"]
    normalize: Callable[[Any, Tensor], Tensor] = field(repr=False)

    def __call__(self, layer: "NormLayer", x: Tensor) -> Tensor:
        """Normalise a batch of `layer`'s inputs."""
        return self.normalize(layer, x)


class NormLayer(nn.Module):
    """A layer that holds running statistics; the rule of the round says how it treats a batch."""

    momentum: float | None

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:
        """Start a round: forget what was recorded and follow `rule`."""
        raise NotImplementedError

    def report(self, statistics: Statistics) -> LayerStats | None:
        """Return the statistics of this round, or None if the rule recorded nothing."""
        raise NotImplementedError

    def read_running(self) -> RunningStats | None:
        """Return a copy of the running statistics, or None if the layer tracks none."""
        raise NotImplementedError

    def load_running(self, running: RunningStats) -> None:
        """Overwrite the running statistics."""
        raise NotImplementedError
