"""Federated BatchNorm (FBN): shared running statistics, pooled by the law of total variance.

Guerraoui, Pinot, Rizk, Stephan and Taïani, "Overcoming the Challenges of Batch Normalization in
Federated Learning", 2024, arXiv:2405.14670.

Client: normalises every batch with the shared running statistics of the round before, which are
constants for the gradient, and records the moments of each layer's input.

Server: pools the moments of all clients and lets the shared statistics follow them.

Deviation: clients report moments with their count instead of locally updated running statistics.
For equal batches the result is the paper's Algorithm 2 to rounding; it also holds for unequal
batches, partial participation, and a client that is lost in mid-round. With E > 1 local steps the
statistics stay fixed within the round, and step s weighs β(1-β)^(E-s). Attacks on statistics
falsify the paper's running statistics, translated into moments (`attacks/adversary.py`).

With local epochs plain FedAvg is ahead, at rates that suit BatchNorm: from the second local step on
the network is one without normalization (`docs/local-epochs.md`). `alignbn` is for that.
"""

from dataclasses import dataclass
from typing import ClassVar

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.moments import pool
from fednorm.core.strategy import MergeInput, average, ema_update
from fednorm.nn import rules
from fednorm.registry import param
from fednorm.strategies.base import FIXED_STATISTICS_REMEDY, SharedStatisticsStrategy


@dataclass(frozen=True)
class FBN(SharedStatisticsStrategy):
    """All clients normalise with the same running statistics, pooled over all of them."""

    needs_batch_statistics: ClassVar[bool] = False
    remedy: ClassVar[str] = FIXED_STATISTICS_REMEDY

    statistics: Statistics = param(
        "pool",
        "'pool' merges the clients' moments by the law of total variance; "
        "'average' leaves out the variance between clients",
    )

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the shared running statistics."""
        return rules.shared_stats

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Pool the clients' moments, and let the shared statistics follow them once."""
        return ema_update(previous, merge, pool) if self.statistics == "pool" else average(merge)
