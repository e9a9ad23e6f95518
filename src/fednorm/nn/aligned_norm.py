"""The rule of alignbn: the batch's own statistics, then a constant map to where all clients are.

A client normalises with its batch, x = (u-μ_B)/√(σ_B²+ε), as torch does, and goes on with
r·x + s. By its own statistics μ, σ² and the shared ones R, V, r = √((σ²+ε)/(V+ε)) and
s = (μ-R)/√(V+ε) are constants of the round: where μ_B = μ and σ_B² = σ², r·x + s = (u-R)/√(V+ε).
"""

import torch
from torch import Tensor, nn

from fednorm.core.layer import NormLayer, NormRule, RoundContext
from fednorm.core.messages import RunningStats
from fednorm.core.moments import Moments
from fednorm.core.strategy import Conversion
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.convert import to_fed_batch_norm


class Placement(NormLayer):
    """A client's own running statistics of a layer, which place it among all clients.

    Before its first round a client takes the shared statistics for its own.
    """

    mean: Tensor
    var: Tensor
    known: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.momentum: float | None = None
        self.register_buffer("mean", torch.zeros_like(like))
        self.register_buffer("var", torch.ones_like(like))
        self.register_buffer("known", torch.zeros((), dtype=torch.int64, device=like.device))
        self.map: tuple[Tensor, Tensor] | None = None

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:  # noqa: ARG002 (interface)
        """Start a round: the map is found anew."""
        self.map = None

    def read_running(self) -> RunningStats | None:
        """Return None: nothing here is shared."""
        return None

    def find_map(self, layer: FedBatchNorm) -> tuple[Tensor, Tensor]:
        """Return scale and shift of the round, found at its first call."""
        if self.map is None:
            mean, var, _ = layer.running_buffers()
            if not self.known:
                self.mean.copy_(mean)
                self.var.copy_(var)
                self.known.fill_(1)
            shared = torch.rsqrt(var + layer.eps)
            self.map = (self.var + layer.eps).sqrt() * shared, (self.mean - mean) * shared
        return self.map

    def follow(self, moments: Moments, momentum: float) -> None:
        """Let the client's statistics follow, as running statistics do."""
        self.mean.lerp_(moments.mean, momentum)
        self.var.lerp_(moments.var, momentum)


def add_placements(model: nn.Module) -> Conversion:
    """Convert BatchNorm layers and give each statistics of the client's own."""
    conversion = to_fed_batch_norm(model, tracking=True)
    for layer in list(conversion.model.modules()):
        if isinstance(layer, FedBatchNorm) and layer.running_mean is not None:
            layer.placement = Placement(layer.running_mean).train(layer.training)
    return conversion


def _placement_of(layer: FedBatchNorm) -> Placement:
    if not isinstance(layer.placement, Placement):
        raise TypeError(f"layer {layer.recorder.site!r} has no placement; convert the model.")
    return layer.placement


def _align(layer: FedBatchNorm, x: Tensor) -> Tensor:
    placement, recorder = _placement_of(layer), layer.recorder
    scale, shift = placement.find_map(layer)
    call, momentum = recorder.next_call(), layer.count_batch()
    if call == len(recorder.logs):  # only the first batch belongs to the received weights
        recorder.add(Moments.of(x.detach()), momentum, rows=len(x), call=call)
    placement.follow(recorder.logs[call].moments, momentum)
    return layer.normalize_corrected(x, scale, shift)


def _accumulate_and_align(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.accumulate(x)
    return layer.normalize_corrected(x, *_placement_of(layer).find_map(layer))


normalize_aligned = NormRule("mixed", tracks=False, reports="moments", normalize=_align)
normalize_aligned_measured = NormRule(
    "mixed", tracks=False, reports="totals", normalize=_accumulate_and_align
)
