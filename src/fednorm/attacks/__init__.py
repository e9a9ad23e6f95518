"""Attacks of Byzantine clients: one class and one line of the registry for each."""

from typing import TYPE_CHECKING, Any

from fednorm.registry import Registry, export_lazily

if TYPE_CHECKING:
    from fednorm.attacks.base import Attack, DataAttack

__all__ = ["ATTACKS", "Attack", "DataAttack", "create_attack", "list_attacks"]

ATTACKS: "Registry[Attack]" = Registry(
    "attack",
    __name__,
    {
        "sign_flip": "simple:SignFlip",
        "foe": "omniscient:FallOfEmpires",
        "alie": "omniscient:ALittleIsEnough",
        "mimic": "omniscient:Mimic",
        "gaussian": "simple:Gaussian",
        "non_finite": "simple:NonFinite",
        "replacement": "simple:ModelReplacement",
        "label_flip": "simple:LabelFlip",
        "backdoor": "simple:Backdoor",
    },
    "fednorm.attacks.base:Attack",
)

__getattr__ = export_lazily(__name__, {"fednorm.attacks.base": "Attack DataAttack"})


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
    return sorted(ATTACKS.list_names())
