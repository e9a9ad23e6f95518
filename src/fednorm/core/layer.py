"""The interface of a layer that normalises by a rule and reports what it saw."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from fednorm.core.exchange import Exchange, Solo
from fednorm.core.messages import LayerStats, RunningStats

Statistics: TypeAlias = Literal["average", "pool"]
Calibration: TypeAlias = Literal["never", "evaluation"]  # before what
NormRule: TypeAlias = Callable[[Any, Tensor], Tensor]  # (layer, batch) -> normalised batch


@dataclass(slots=True)
class RoundContext:
    """What all layers of a model share during one round of one client."""

    exchange: Exchange = field(default_factory=Solo)
    step: int = -1  # which mini-batch of the round, counted from 0; -1 where nobody counts
    samples: int = 0  # of that mini-batch; 0 where only the layers know, by the rows that they see
    examples: int = 0  # the client's weight in averages
    client_sizes: tuple[int, ...] = ()  # as in `Batches`


class NormLayer(nn.Module):
    """A layer that holds running statistics; the rule of the round says how it treats a batch."""

    momentum: float | None

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:
        """Start a round: forget what was recorded and follow `rule`."""
        raise NotImplementedError

    def report(self, statistics: Statistics) -> LayerStats | None:
        """Return what this round showed, or None if the rule recorded nothing."""
        raise NotImplementedError

    def read_running(self) -> RunningStats | None:
        """Return a copy of the running statistics, or None if the layer tracks none."""
        raise NotImplementedError

    def load_running(self, running: RunningStats) -> None:
        """Overwrite the running statistics."""
        raise NotImplementedError
