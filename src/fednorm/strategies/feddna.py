"""FedDNA: statistics merged apart from the weights, with an importance for each client and layer.

Duan, Li and Lu, "FedDNA: Federated Learning with Decoupled Normalization-Layer Aggregation for
Non-IID Data", ECML PKDD 2021, doi:10.1007/978-3-030-86486-6_44; compared with other methods in
Zhong, Chen and Chao, 2023, arXiv:2303.06530, Table 5.

Client: ordinary BatchNorm on its own batches; reports the moments of each layer's input.

Server: averages weights, γ and β; pools the moments with importance weights that keep the clients'
distributions close to the pooled one.

Deviation: the paper finds the weights with an adversarial variational autoencoder. Here they are
ours: for each layer, weights w on the simplex that minimise

    Σ w_i · KL(client i ‖ pooled) + KL(w ‖ n) / strength

where clients are Gaussians in each channel, their divergence is the mean over channels, and n are
the clients' shares of all values. Given w, the best Gaussian has the pooled moments; given that,
w_i is proportional to n_i · exp(-strength · KL(client i ‖ pooled)). The two steps alternate from
w = n, and neither can raise the sum. A client far from the others weighs less than its share, and
one that is several standard deviations away in most channels nothing at all; `strength=0` is
`naive` with `statistics="pool"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.core.aggregation import Aggregator
from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.moments import Moments, pool
from fednorm.core.strategy import MergeInput, ema_update
from fednorm.nn import rules
from fednorm.registry import param
from fednorm.strategies.base import RunningStatisticsStrategy

_EPS = 1e-5  # as BatchNorm adds to a variance: smaller differences are invisible to it


@dataclass(frozen=True)
class FedDNA(RunningStatisticsStrategy):
    """Ordinary BatchNorm on clients; statistics pooled with importance weights."""

    needs_tracking: ClassVar[bool] = True
    merges_sums: ClassVar[bool] = False
    statistics = "pool"

    strength: float = param(
        1.0, "how strongly divergence lowers a client's weight; 0 keeps the shares of the counts"
    )
    iterations: int = param(10, "steps of the search for the weights, at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength must be 0 or more and finite, not {self.strength}.")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, not {self.iterations}.")

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics and record its moments."""
        return rules.batch_stats_recorded

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Pool the moments with importance weights; the running statistics follow them."""
        if not merge.aggregator.uses_weights:  # a robust rule looks at no weights
            return ema_update(previous, merge)
        return ema_update(previous, merge, self._pool)

    def _pool(self, moments: Sequence[Moments], aggregate: Aggregator) -> Moments:
        return pool(reweight(moments, self.strength, self.iterations), aggregate)


def reweight(moments: Sequence[Moments], strength: float, iterations: int) -> list[Moments]:
    """Return the same moments with importance in their weights, whose sum stays what it was.

    >>> here, there = torch.zeros(1), torch.full((1,), 2.0)
    >>> three = [Moments(4.0, mean, torch.ones(1)) for mean in (here, here, there)]
    >>> [round(m.mass, 1) for m in reweight(three, strength=1.0, iterations=10)]
    [4.9, 4.9, 2.2]
    """
    masses = torch.tensor([m.mass for m in moments], dtype=torch.float64)
    weighted = list(moments)
    for _ in range(iterations if masses.count_nonzero() > 1 else 0):
        distance = divergence(moments, pool(weighted))
        # Only differences count: the nearest client gets 1, so that not all can underflow.
        further = (distance - distance[masses > 0].min()).clamp_min(0)
        factors = torch.exp(-strength * further)
        factors *= masses.sum() / (masses * factors).sum()
        weighted = [
            replace(m, weight=m.mass * float(f)) for m, f in zip(moments, factors, strict=True)
        ]
    return weighted


def divergence(moments: Sequence[Moments], pooled: Moments) -> Tensor:
    """Return KL(client ‖ pooled) of each client, the mean over channels."""
    mean, var = pooled.mean, pooled.var + _EPS
    own = torch.stack([m.var for m in moments]) + _EPS
    shift = torch.stack([m.mean for m in moments]) - mean
    ratio = own / var
    return (ratio - 1 - ratio.log() + shift**2 / var).mean(1).to("cpu", torch.float64) / 2
