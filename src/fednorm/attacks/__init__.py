"""Attacks of Byzantine clients: one file and one line of the registry for each."""

from typing import TYPE_CHECKING, Any

from fednorm.registry import Registry, export_lazily

if TYPE_CHECKING:
    from fednorm.attacks.adversary import Adversary, apply_attack, choose_byzantine
    from fednorm.attacks.backdoor import Backdoor
    from fednorm.attacks.base import Attack, DataAttack, DataInfo
    from fednorm.attacks.translation import TrackedLayer, find_tracked_layers

__all__ = [
    "ATTACKS",
    "Adversary",
    "Attack",
    "Backdoor",
    "DataAttack",
    "DataInfo",
    "TrackedLayer",
    "apply_attack",
    "choose_byzantine",
    "create_attack",
    "find_tracked_layers",
    "list_attacks",
]

ATTACKS: "Registry[Attack]" = Registry(
    "attack",
    __name__,
    {
        "sign_flip": "sign_flip:SignFlip",
        "foe": "foe:FallOfEmpires",
        "alie": "alie:ALittleIsEnough",
        "mimic": "mimic:Mimic",
        "gaussian": "gaussian:Gaussian",
        "non_finite": "non_finite:NonFinite",
        "replacement": "model_replacement:ModelReplacement",
        "label_flip": "label_flip:LabelFlip",
        "backdoor": "backdoor:Backdoor",
    },
)

__getattr__ = export_lazily(
    __name__,
    {
        "fednorm.attacks.adversary": "Adversary apply_attack choose_byzantine",
        "fednorm.attacks.backdoor": "Backdoor",
        "fednorm.attacks.base": "Attack DataAttack DataInfo",
        "fednorm.attacks.translation": "TrackedLayer find_tracked_layers",
    },
)


def create_attack(name: str, **fields: Any) -> "Attack":
    """Create the attack `name`; `fields` are its settings.

    >>> create_attack("foe", epsilon=0.5)
    FallOfEmpires(epsilon=0.5)
    """
    return ATTACKS.create(name, fields)


def list_attacks() -> list[str]:
    """Return the names of all attacks, sorted.

    >>> list_attacks()[:3]
    ['alie', 'backdoor', 'foe']
    """
    return sorted(ATTACKS)
