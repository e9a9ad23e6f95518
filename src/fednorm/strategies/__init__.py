"""Normalization strategies: one file for each method, and one line here."""

from typing import Any

from fednorm.core.strategy import Strategy
from fednorm.registry import create
from fednorm.strategies.brn import BRN
from fednorm.strategies.dualbn import DualBN
from fednorm.strategies.fbn import FBN
from fednorm.strategies.fedbn import FedBN
from fednorm.strategies.feddna import FedDNA
from fednorm.strategies.fedfn import FedFN
from fednorm.strategies.fedtan import FedTAN
from fednorm.strategies.fedwon import FedWon
from fednorm.strategies.fixbn import FixBN
from fednorm.strategies.fixup import Fixup
from fednorm.strategies.gn import GN
from fednorm.strategies.gn_ws import GnWs
from fednorm.strategies.hbn import HBN
from fednorm.strategies.heterofl import HeteroFL
from fednorm.strategies.instance_norm import IN
from fednorm.strategies.ln import LN
from fednorm.strategies.naive import Naive
from fednorm.strategies.none import NoNorm
from fednorm.strategies.silobn import SiloBN
from fednorm.strategies.switchnorm import SwitchNorm

STRATEGIES: dict[str, type[Strategy]] = {
    "naive": Naive,
    "fixbn": FixBN,
    "fbn": FBN,
    "dualbn": DualBN,
    "fedtan": FedTAN,
    "fedbn": FedBN,
    "silobn": SiloBN,
    "hbn": HBN,
    "heterofl": HeteroFL,
    "feddna": FedDNA,
    "brn": BRN,
    "switchnorm": SwitchNorm,
    "gn": GN,
    "ln": LN,
    "in": IN,
    "none": NoNorm,
    "gn_ws": GnWs,
    "fixup": Fixup,
    "fedwon": FedWon,
    "fedfn": FedFN,
}


def create_strategy(name: str, **fields: Any) -> Strategy:
    """Make a strategy by its name; fields are its hyper-parameters.

    >>> create_strategy("fixbn", freeze_round=300).freeze_round
    300
    """
    return create("strategy", STRATEGIES, name, fields)


def list_strategies() -> list[str]:
    """Return the names of all strategies.

    >>> "fbn" in list_strategies()
    True
    """
    return list(STRATEGIES)
