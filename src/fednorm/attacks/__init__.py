"""Attacks of Byzantine clients: one file and one line of the registry for each."""

from typing import Any

from fednorm.attacks.adversary import Adversary, Target, apply_attack, choose_byzantine
from fednorm.attacks.alie import ALittleIsEnough
from fednorm.attacks.backdoor import Backdoor
from fednorm.attacks.base import Attack, DataAttack, DataInfo
from fednorm.attacks.foe import FallOfEmpires
from fednorm.attacks.gaussian import Gaussian
from fednorm.attacks.label_flip import LabelFlip
from fednorm.attacks.mimic import Mimic
from fednorm.attacks.model_replacement import ModelReplacement
from fednorm.attacks.non_finite import NonFinite
from fednorm.attacks.sign_flip import SignFlip
from fednorm.attacks.translation import TrackedLayer, find_tracked_layers
from fednorm.registry import create

ATTACKS: dict[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "foe": FallOfEmpires,
    "alie": ALittleIsEnough,
    "mimic": Mimic,
    "gaussian": Gaussian,
    "non_finite": NonFinite,
    "replacement": ModelReplacement,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
}

__all__ = [
    "ATTACKS",
    "Adversary",
    "Attack",
    "Backdoor",
    "DataAttack",
    "DataInfo",
    "Target",
    "TrackedLayer",
    "apply_attack",
    "choose_byzantine",
    "create_attack",
    "find_tracked_layers",
    "list_attacks",
]


def create_attack(name: str, **fields: Any) -> Attack:
    """Create the attack `name`; `fields` are its settings.

    >>> create_attack("foe", epsilon=0.5)
    FallOfEmpires(epsilon=0.5)
    """
    return create("attack", ATTACKS, name, fields)


def list_attacks() -> list[str]:
    """Return the names of all attacks, sorted.

    >>> list_attacks()[:3]
    ['alie', 'backdoor', 'foe']
    """
    return sorted(ATTACKS)
