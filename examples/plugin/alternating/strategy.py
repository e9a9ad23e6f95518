"""Alternating statistics: the shared ones in odd rounds, the batch's own in even rounds.

A template, and no published method.

Client: normalizes with the shared or with the batch's statistics and records moments.

Server: pools the moments by the law of total variance.
"""

from dataclasses import dataclass

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.messages import Broadcast
from fednorm.nn import rules
from fednorm.registry import param
from fednorm.strategies.base import SharedStatisticsStrategy


@dataclass(frozen=True)
class Alternating(SharedStatisticsStrategy):
    """Shared statistics in every n-th round, the batch's own in between."""

    statistics: Statistics = param("pool", "how the clients' statistics are merged")
    period: int = param(2, "rounds from one with shared statistics to the next")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period must be at least 1 round, not {self.period}.")

    def rule(self, broadcast: Broadcast) -> NormRule:
        """Return how layers treat batches in this round."""
        shared = broadcast.round % self.period == 1 % self.period
        return rules.shared_stats if shared else rules.batch_stats_recorded
