"""LayerNorm: FedAvg on a model whose samples torch normalises by all their values."""

import torch
from torch import nn
from torch.nn import functional

from support import assert_is_fedavg_with


class SampleLayerNorm(nn.Module):
    """Normalise a sample over channels and places with torch's layer_norm; γ, β per channel."""

    def __init__(self, old):
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(old.weight))
        self.bias = nn.Parameter(torch.empty_like(old.bias))
        self.eps = old.eps

    def forward(self, x):
        normal = functional.layer_norm(x, x.shape[1:], eps=self.eps)
        return normal * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def test_is_fedavg_with_torchs_layer_norm():
    assert_is_fedavg_with("ln", SampleLayerNorm)
