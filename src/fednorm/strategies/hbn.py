"""Hybrid BatchNorm (HBN): each client mixes shared and batch statistics as it sees fit.

Chen, Xu, Wu and Kittler, "Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation
in Federated Learning", ICML 2025, arXiv:2505.21877.

Client: in training it normalises with (1-a)·shared + a·batch, mean and variance alike;
a = sigmoid(α) is learnt per channel and stays with the client. At the start of a round it sends all
its data through the received model, normalised in this way, and reports the moments of each layer's
input with its update.

Server: pools the moments by the law of total variance, and lets the shared statistics follow with a
small momentum; clients use them from the next round on.

Test: all clients send their data through the final model in the same way and report the mixed
statistics, with which their layers normalised. Pooled, these replace the shared ones for the test
alone: the shared ones follow slowly and do not belong to the model, and those of the inputs do not
belong to layers that were given something else in training. Evaluation uses nothing of a client's
own, so there is a global model.

Deviations from the authors' code, which measures one batch of 64 samples and reports the mixed
statistics in training as well: here it is all data of a client and its inputs, which learns faster.
A test asks all clients, not those of the last round; the authors' server averages α for a client's
first round, here it starts from 0. The first measurement sets the shared statistics instead of
following from 0 and 1, which with a momentum of 0.002 would take some thousand rounds to forget.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fednorm.core.layer import Calibration, NormRule
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.strategy import Conversion, MergeInput, pool_statistics
from fednorm.core.types import Kind, Role
from fednorm.nn.hybrid_norm import (
    Mixing,
    add_mixing,
    normalize_hybrid,
    normalize_hybrid_calibrated,
    normalize_hybrid_measured,
)
from fednorm.registry import param
from fednorm.strategies.base import BatchNormStrategy, require_batch_norm


@dataclass(frozen=True)
class HBN(BatchNormStrategy):
    """Per channel a learnt, personal mix of shared and batch statistics."""

    statistics = "pool"
    calibration: ClassVar[Calibration] = "evaluation"
    measures: ClassVar[bool] = True

    stats_momentum: float = param(0.002, "with which the shared statistics follow, in (0, 1]")

    def __post_init__(self) -> None:
        if not 0 < self.stats_momentum <= 1:
            raise ValueError(f"stats_momentum must be in (0, 1], not {self.stats_momentum}.")

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers have a mixing weight."""
        return require_batch_norm(add_mixing(model), self, model)

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Keep the mixing weights on the client."""
        return Role.PERSONAL if isinstance(module, Mixing) else super().role(module, kind)

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the mixed statistics."""
        return normalize_hybrid

    def measure_rule(self) -> NormRule:
        """Normalise with the mixed statistics, as training does; report those of the inputs."""
        return normalize_hybrid_measured

    def calibration_rule(self) -> NormRule:
        """Normalise with the mixed statistics, as training does; report the mixed ones."""
        return normalize_hybrid_calibrated

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Let the shared statistics follow what the clients measured before they trained."""
        now = pool_statistics(merge)
        rate = self.stats_momentum if previous.num_batches else 1.0
        return RunningStats(
            mean=torch.lerp(previous.mean, now.mean, rate),
            var=torch.lerp(previous.var, now.var, rate),
            num_batches=now.num_batches,
        )
