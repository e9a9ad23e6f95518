"""Static BatchNorm (HeteroFL): nothing is tracked in training, statistics are asked for afterwards.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, arXiv:2010.01264.

Client: ordinary BatchNorm on its own batches, without running statistics.

Server: averages weights, γ and β. Before an evaluation it asks all clients once to send their data
through the model, batch by batch; the running statistics are the average over all clients' batches
of the batches' means and variances, as torch's BatchNorm with momentum=None would have them. The
switch `statistics="pool"` merges the moments of all values by the law of total variance instead.

Deviation: the authors' code passes shuffled batches of all training data through the model, which a
server does not have; here, as in their text, a batch is one client's. Where clients differ, theirs
contains the variance between clients, which "pool" contains and "average" does not.

Only the normalization of HeteroFL is here, not its clients with models of different widths.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fednorm.core.layer import Calibration, NormRule, Statistics
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.strategy import Conversion, MergeInput, average_weighted
from fednorm.nn import rules
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.registry import param
from fednorm.strategies.base import BatchNormStrategy, require_batch_norm


@dataclass(frozen=True)
class HeteroFL(BatchNormStrategy):
    """BatchNorm that tracks nothing in training; clients are calibrated before evaluation."""

    calibration: ClassVar[Calibration] = "evaluation"
    mergeable_batches: ClassVar[bool] = True

    statistics: Statistics = param(
        "average",
        "'average' takes the mean over all batches of their means and variances, as the paper "
        "does; 'pool' merges the moments of all values by the law of total variance",
    )

    def __post_init__(self) -> None:
        if self.statistics not in ("average", "pool"):
            raise ValueError(f"statistics must be 'average' or 'pool', not {self.statistics!r}.")

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers follow this strategy's rule."""
        return require_batch_norm(to_fed_batch_norm(model, tracking=True), self, model)

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics and track nothing."""
        return rules.batch_stats_untracked

    def calibration_rule(self) -> NormRule:
        """Normalise with the batch's own statistics, and average or pool them."""
        return rules.calibrate_averaged if self.statistics == "average" else rules.calibrate_batch

    def adopt(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Average over all clients' batches, each of which weighs the same, or pool."""
        if self.statistics == "pool":
            return super().adopt(previous, merge)
        return average_weighted(
            merge, [r.num_batches - previous.num_batches for r in merge.reports]
        )
