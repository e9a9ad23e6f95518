"""FedWon: no normalization; the convolutions are reparameterised instead.

Zhuang and Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", ICLR
2024, arXiv:2306.05879. Scaled weight standardisation: Brock, De and Smith, 2021, arXiv:2101.08692.
Adaptive gradient clipping: Brock, De, Smith and Simonyan, 2021, arXiv:2102.06171.

Client: trains the model with its BatchNorm layers taken out. Kernels are standardised per output
channel, γ·gain·(w - mean)/√(var·fan_in + 1e-4), with a learnable gain and γ = √(2/(1-1/π)), which
makes up for a ReLU. With `clip` (such as 0.01), the gradient of each unit, that is of one output
channel or neuron, is scaled down before each step where its norm exceeds `clip` times the norm of
the unit's weights (at least 0.001). This concerns the weights of convolutions and linear layers,
except the linear layer that the model registers last: the classifier. Weight decay and momentum
come after it.

Server: averages everything, gains included.

Deviations: γ is applied in every convolution, whether or not a ReLU precedes it; residual branches
are not rescaled as in NF-ResNets; convolutions without a bias get none, though BatchNorm's β goes.
Gains and biases are not clipped: the papers define it for the rows of a weight; NFNets' code clips
each vector as one unit, too. With clipping, federated is not centralized training even where every
client takes one step: each client clips its own gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fednorm.core.strategy import Conversion, Strategy
from fednorm.core.types import Clip
from fednorm.nn.convert import remove
from fednorm.nn.weight_std import StandardizedConv, standardize
from fednorm.registry import param
from fednorm.strategies.base import require_batch_norm

EPS = 1e-4
LEAST_NORM = 1e-3


@dataclass(frozen=True)
class FedWon(Strategy):
    """No normalization; scaled weight standardisation, and gradients clipped on demand."""

    clip: float | None = param(
        None,
        "largest norm of a unit's gradient, in norms of its weights, such as 0.01; "
        "'none' clips nothing",
    )

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or 'none', not {self.clip}.")

    def clips(self, model: nn.Module) -> Mapping[nn.Parameter, Clip]:
        """Return how the weights' gradients are clipped."""
        if self.clip is None:
            return {}
        return dict.fromkeys(_clip(model), partial(agc, clip=self.clip))

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy without BatchNorm layers, with standardised convolutions.

        Clipping is no part of the model but of the step: see `clips`.
        """
        bare = require_batch_norm(remove(model), self, model)
        convs = standardize(bare.model, scale_by_fan_in=True, eps=EPS, gain=True, bias=True)
        if not convs.replaced:
            raise ValueError(
                f"FedWon needs convolutions, but {type(model).__name__} has none; choose 'none'."
            )
        return replace(bare, model=convs.model, replaced=bare.replaced + convs.replaced)


def _clip(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights whose gradients are clipped."""
    convs = [m for m in model.modules() if isinstance(m, StandardizedConv)]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [layer.get_parameter("weight") for layer in (*convs, *linear[:-1])]


def agc(gradient: Tensor, weight: Tensor, clip: float) -> Tensor:
    """Scale each unit's gradient down to at most `clip` times the norm of its weights.

    >>> agc(torch.tensor([[3.0, 4.0], [0.1, 0.0]]), torch.ones(2, 2), clip=0.5).norm(dim=1)
    tensor([0.7071, 0.1000])
    """
    norms = gradient.flatten(1).norm(dim=1)
    most = clip * weight.flatten(1).norm(dim=1).clamp_min(LEAST_NORM)
    factor = torch.where(norms > most, most / norms, torch.ones_like(norms))
    return gradient * factor.view(-1, *[1] * (gradient.dim() - 1))
