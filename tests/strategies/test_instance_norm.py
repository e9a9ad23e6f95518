"""InstanceNorm: FedAvg on a model with torch's own InstanceNorm layers."""

import pytest
import torch
from torch import nn

from fednorm import create_strategy
from support import assert_is_fedavg_with


def test_is_fedavg_with_torchs_instance_norm():
    assert_is_fedavg_with(
        "in", lambda old: nn.InstanceNorm2d(old.num_features, old.eps, affine=True)
    )


def test_one_value_per_channel_is_refused():
    model = create_strategy("in").convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).model
    with pytest.raises(ValueError, match="value"):
        model(torch.randn(4, 2))
