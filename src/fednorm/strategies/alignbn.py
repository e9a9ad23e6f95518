"""alignbn: each batch by its own statistics, then moved to where those of all clients put it.

A method of this library, for one local step a round and for hundreds. It pools statistics as FBN
does (Guerraoui et al., 2024, arXiv:2405.14670) and corrects batches by constants as batch
renormalization does (Ioffe, 2017, arXiv:1702.03275), but by a client's place among all clients
instead of the batch's place among others.

Client: normalises with its batch's own mean and standard deviation, as torch does, gradient
included, and then scales and shifts each channel by constants of the round: by its own statistics
μ, σ² and the shared R, V, x̂ = r·x̂_B + s with r = √((σ²+ε)/(V+ε)) and s = (μ-R)/√(V+ε). Own and
shared statistics belong to the same weights, so that x̂ is what the statistics of all clients would
give, up to the noise of the batch. When the weights move in local steps the batch's statistics move
along, and only the client's place among the others, r and s, is old. It measures the first batch of
a round, which belongs to the received weights, and reports its moments. Before its first round it
takes the shared statistics for its own: r = 1, s = 0 is plain BatchNorm.

Server: pools the moments and lets the shared statistics follow, as in FBN: by 1-(1-β)^E after E
local steps. By as much a client's own follow what it measured, when it takes part again.

Test: all clients send their data through the final model, normalised as in training, and the
pooled statistics of all layers are used for the test. Evaluation is torch's, with nothing of a
client's own, so there is a global model. `docs/own-methods.md` has derivation and measurements.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fednorm.core.layer import Calibration, NormRule
from fednorm.core.messages import Broadcast
from fednorm.core.strategy import Conversion
from fednorm.core.types import Kind, Role
from fednorm.nn.aligned_norm import (
    Placement,
    add_placements,
    normalize_aligned,
    normalize_aligned_measured,
)
from fednorm.strategies.base import BatchNormStrategy, require_batch_norm


@dataclass(frozen=True)
class AlignBN(BatchNormStrategy):
    """The batch's own statistics, then a constant map to where all clients are."""

    statistics = "pool"
    calibration: ClassVar[Calibration] = "evaluation"

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers know the client's own statistics."""
        return require_batch_norm(add_placements(model), self, model)

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Keep a client's own statistics with it."""
        return Role.PERSONAL if isinstance(module, Placement) else super().role(module, kind)

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics, then align."""
        return normalize_aligned

    def calibration_rule(self) -> NormRule:
        """Normalise as training does, and report the moments of the inputs."""
        return normalize_aligned_measured
