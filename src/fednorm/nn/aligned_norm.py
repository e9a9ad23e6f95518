"""The rule of alignbn: the batch's own statistics, then a constant map to where all clients are.

A client normalises with its batch, x = (u-μ_B)/√(σ_B²+ε), as torch does, and scales and shifts it
to r·x + s. By its own statistics μ, σ² and the shared ones R, V, r = √((σ²+ε)/(V+ε)) and
s = (μ-R)/√(V+ε) are constants of the round: where μ_B = μ and σ_B² = σ², r·x + s = (u-R)/√(V+ε).
"""

import torch
from torch import Tensor, nn

from fednorm.core.layer import NormLayer, NormRule, RoundContext
from fednorm.core.messages import RunningStats
from fednorm.core.moments import Moments
from fednorm.core.strategy import Conversion, find_rate
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.convert import add_to_norms, to_fed_batch_norm


class Placement(NormLayer):
    """A client's own running statistics of a layer, which place it among all clients.

    They follow what the client measured in its last round, in its next round, by as much as the
    shared ones have followed since: a client that takes fewer steps than others, or was away, has
    statistics of the same age. Before its first round it takes the shared ones for its own.
    """

    mean: Tensor
    var: Tensor
    measured_mean: Tensor
    measured_var: Tensor
    batches: Tensor  # the shared counter when it measured; -1 before

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.momentum: float | None = None
        for name in ("mean", "var", "measured_mean", "measured_var"):
            self.register_buffer(name, torch.zeros_like(like))
        unknown = torch.tensor(-1, dtype=torch.int64, device=like.device)
        self.register_buffer("batches", unknown)
        self.map: tuple[Tensor, Tensor] | None = None
        self.calls = 0.0  # of the layer in the measured step; the last one weighs 1

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:  # noqa: ARG002 (interface)
        """Start a round: the map is found anew, and nothing is measured yet."""
        self.map, self.calls = None, 0.0

    def read_running(self) -> RunningStats | None:
        """Return None: nothing here is shared."""
        return None

    def find_map(self, layer: FedBatchNorm) -> tuple[Tensor, Tensor]:
        """Return scale and shift of the round, found at its first call."""
        if self.map is None:
            mean, var, batches = layer.running_buffers()
            if self.batches < 0:
                self.mean.copy_(mean)
                self.var.copy_(var)
            elif self.batches < batches:  # else the server has not heard of what was measured
                own = RunningStats(self.mean, self.var, int(self.batches))
                rate = find_rate(own, int(batches), layer.momentum)
                self.mean.lerp_(self.measured_mean, rate)
                self.var.lerp_(self.measured_var, rate)
            self.batches.copy_(batches)
            shared = torch.rsqrt(var + layer.eps)
            self.map = (self.var + layer.eps).sqrt() * shared, (self.mean - mean) * shared
        return self.map

    def measure(self, moments: Moments, momentum: float) -> None:
        """Remember the moments of a batch; those of later calls weigh as they do at the server."""
        self.calls = self.calls * (1 - momentum) + 1
        self.measured_mean.lerp_(moments.mean, 1 / self.calls)
        self.measured_var.lerp_(moments.var, 1 / self.calls)


def add_placements(model: nn.Module) -> Conversion:
    """Convert BatchNorm layers and give each statistics of the client's own."""
    return add_to_norms(to_fed_batch_norm(model, tracking=True), "placement", Placement)


def _placement_of(layer: FedBatchNorm) -> Placement:
    if not isinstance(layer.placement, Placement):
        raise TypeError(f"layer {layer.recorder.site!r} has no placement; convert the model.")
    return layer.placement


def _align(layer: FedBatchNorm, x: Tensor) -> Tensor:
    placement, recorder = _placement_of(layer), layer.recorder
    scale, shift = placement.find_map(layer)
    call, momentum = recorder.next_call(), layer.count_batch()
    if call == len(recorder.logs):  # only the first batch belongs to the received weights
        moments = Moments.of(x.detach())
        recorder.add(moments, momentum, rows=len(x), call=call)
        placement.measure(moments, layer.momentum or 0.0)
    return layer.normalize_corrected(x, scale, shift)


def _accumulate_and_align(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.accumulate(x)
    return layer.normalize_corrected(x, *_placement_of(layer).find_map(layer))


normalize_aligned = NormRule("mixed", tracks=False, reports="moments", normalize=_align)
normalize_aligned_measured = NormRule(
    "mixed", tracks=False, reports="totals", normalize=_accumulate_and_align
)
