"""Networks without BatchNorm, as ViT and ConvNeXt are, under the strategies that take them."""

import pytest
import torch
from torch import Tensor, nn

import fednorm
from fednorm.core.types import Role
from fednorm.errors import ConfigError
from fednorm.strategies import STRATEGIES

TAKING = {"naive", "none", "fedbn", "fedfn"}
SETTINGS = {"rounds": 2, "clients": 7, "participation": 0.6, "batch_size": 8}
SETTINGS |= {"algorithm": "fedavg", "local_epochs": 1, "data": {"name": "digits", "test": 1500}}


class SmallViT(nn.Module):
    """Patches, one block of attention, and a linear head."""

    def __init__(self, width=8):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.after = nn.RMSNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        y = self.before(tokens)
        tokens = tokens + self.attention(y, y, y, need_weights=False)[0]
        return self.head(self.after(tokens).mean(1))


class SmallConvNeXt(nn.Module):
    """A depthwise convolution, GroupNorm, and pointwise layers around a skip connection."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GroupNorm(1, width),
            nn.Conv2d(width, 2 * width, 1),
            nn.GELU(),
            nn.Conv2d(2 * width, width, 1),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


NORMS = {SmallViT: {"before", "after"}, SmallConvNeXt: {"block.1"}}


def test_the_list_of_strategies_that_take_them_is_whole():
    for name in STRATEGIES:
        for network in NORMS:
            if name in TAKING:
                fednorm.convert(network(), name)
            else:
                with pytest.raises(
                    ValueError, match=rf"{network.__name__} has none; choose 'naive'"
                ):
                    fednorm.convert(network(), name)


@pytest.mark.parametrize("network", NORMS)
def test_naive_is_federated_averaging(network):
    """Nothing is converted, and `none` gives the same bits."""
    naive, none = (fednorm.simulate(name, model=network, **SETTINGS) for name in ("naive", "none"))
    assert naive.conversion == ()
    assert not naive.personal
    assert naive.history == none.history
    for one, other in zip(naive.model().parameters(), none.model().parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("network", NORMS)
def test_clients_of_fedbn_keep_their_layers(network):
    torch.manual_seed(0)
    task = fednorm.Task.build(
        network(), fednorm.create_strategy("fedbn"), fednorm.create_algorithm("fedavg")
    )
    personal = {key for key, role in task.layout.roles.items() if role is Role.PERSONAL}
    assert {key.rpartition(".")[0] for key in personal} == NORMS[network]
    result = fednorm.simulate("fedbn", model=network, **{**SETTINGS, "participation": 1})
    assert result.personal
    one, two = (dict(result.model(client=client).named_parameters()) for client in (0, 1))
    different = {key for key in one if not torch.equal(one[key], two[key])}
    assert different == personal


@pytest.mark.parametrize("network", NORMS)
def test_the_reference_trains_them(network):
    assert fednorm.simulate("centralized", model=network, **SETTINGS).status == "finished"


def test_a_refusal_in_a_comparison_says_what_to_choose():
    with pytest.raises(
        ConfigError, match=r"^fbn: FBN needs .*'fedbn', whose clients keep LayerNorm"
    ):
        fednorm.compare(model=SmallViT, strategies=["naive", "fbn"], **SETTINGS)
    with pytest.raises(ConfigError, match=r"SiloBN needs BatchNorm layers"):
        fednorm.compare(model=SmallViT, strategies=["silobn"], **SETTINGS)
