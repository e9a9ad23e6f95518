"""No normalization: FedAvg on the model without its BatchNorm layers."""

from torch import nn

from support import assert_is_fedavg_with


def test_is_fedavg_without_the_layers():
    assert_is_fedavg_with("none", lambda _: nn.Identity())
