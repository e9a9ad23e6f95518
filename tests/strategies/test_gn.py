"""GroupNorm: FedAvg on a model with torch's own GroupNorm layers."""

import pytest
from torch import nn

from fednorm import create_strategy
from fednorm.errors import ConversionError
from support import assert_is_fedavg_with, nested_model


@pytest.mark.parametrize("groups", [1, 2])
def test_is_fedavg_with_torchs_group_norm(groups):
    assert_is_fedavg_with(
        "gn", lambda old: nn.GroupNorm(groups, old.num_features, old.eps), groups=groups
    )


def test_groups_that_do_not_divide_the_channels_are_refused_or_rounded_down():
    with pytest.raises(ConversionError, match="6 channels, which 4 groups do not divide"):
        create_strategy("gn", groups=4).convert(nested_model())
    assert_is_fedavg_with(
        "gn",
        lambda old: nn.GroupNorm({4: 4, 6: 3}[old.num_features], old.num_features, old.eps),
        groups=4,
        round_down=True,
    )


def test_groups_must_be_positive():
    with pytest.raises(ValueError, match="groups must be at least 1, not 0"):
        create_strategy("gn", groups=0)
