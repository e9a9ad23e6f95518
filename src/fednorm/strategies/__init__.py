"""Normalization strategies: one file for each method, and one line here."""

from typing import TYPE_CHECKING, Any

from fednorm.errors import ConfigError
from fednorm.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from fednorm.core.strategy import Strategy

__all__ = ["STRATEGIES", "convert", "create_strategy", "list_strategies"]

STRATEGIES: "Registry[Strategy]" = Registry(
    "strategy",
    __name__,
    {
        "naive": "naive:Naive",
        "fixbn": "fixbn:FixBN",
        "fbn": "fbn:FBN",
        "dualbn": "dualbn:DualBN",
        "alignbn": "alignbn:AlignBN",
        "fedtan": "fedtan:FedTAN",
        "fedbn": "fedbn:FedBN",
        "silobn": "silobn:SiloBN",
        "hbn": "hbn:HBN",
        "heterofl": "heterofl:HeteroFL",
        "feddna": "feddna:FedDNA",
        "brn": "brn:BRN",
        "switchnorm": "switchnorm:SwitchNorm",
        "gn": "gn:GN",
        "ln": "ln:LN",
        "in": "instance_norm:IN",
        "none": "none:NoNorm",
        "gn_ws": "gn_ws:GnWs",
        "fixup": "fixup:Fixup",
        "fedwon": "fedwon:FedWon",
        "fedfn": "fedfn:FedFN",
    },
    "fednorm.core.strategy:Strategy",
)


def create_strategy(name: str, **fields: Any) -> "Strategy":
    """Create the strategy `name`; `fields` are its hyper-parameters.

    >>> create_strategy("fixbn", freeze_round=300).freeze_round
    300
    """
    return STRATEGIES.create(name, fields)


def list_strategies() -> list[str]:
    """Return the names of all strategies, sorted.

    >>> list_strategies()[:3]
    ['alignbn', 'brn', 'dualbn']
    """
    return sorted(STRATEGIES.list_names())


def convert(model: "nn.Module", strategy: "str | Strategy", **fields: Any) -> "nn.Module":
    """Return a copy of `model` with the layers of `strategy`; `fields` are its hyper-parameters.

    >>> from torch import nn
    >>> convert(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), "gn", groups=2)[1].num_groups
    2
    """
    if isinstance(strategy, str):
        strategy = create_strategy(strategy, **fields)
    elif fields:
        raise ConfigError(f"{strategy} has its fields; {', '.join(fields)} cannot be given again.")
    return strategy.convert(model).model
