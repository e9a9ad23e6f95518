"""A minute's version of an experiment: made-up data in the shape of the real, two tiny rounds."""

from collections.abc import Mapping
from typing import Any

_SHAPES = {  # channels and pixels of the stand-in; large images are made smaller
    "mnist": (1, 28),
    "fashion_mnist": (1, 28),
    "femnist": (1, 28),
    "patterns": (1, 28),
}
_COLOUR = (3, 32)
_CLASSES, _CLIENTS, _SAMPLES, _BATCH, _STEPS = 10, 5, 12, 4, 2


def smoke(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment with the same network, strategies and kind of partition."""
    clients = min(values.get("clients", 10), _CLIENTS)
    small = {
        "data": _stand_in(_name(values.get("data", "digits")), clients),
        "clients": clients,
        "rounds": 2,
        "batch": _BATCH,
        "seeds": [0],
        "eval_every": 2,
        "participation": max(values.get("participation", 1.0), 2 / clients),
    }
    full = values.get("clients", _CLIENTS)
    if "byzantine" in values:
        small["byzantine"] = _fewer(values["byzantine"], full, clients)
    if any(isinstance(e, Mapping) and "byzantine" in e for e in values.get("strategies", ())):
        small["strategies"] = [_with_fewer(e, full, clients) for e in values["strategies"]]
    if "steps" in values:
        small["steps"] = min(values["steps"], _STEPS)
    if "epochs" in values:
        small["epochs"] = 1
    return {**values, **small}


def _fewer(byzantine: int, full: int, clients: int) -> int:
    """Return about the same share of fewer clients, and less than half of them."""
    return min(round(byzantine * clients / full), (clients - 1) // 2)


def _with_fewer(entry: Any, full: int, clients: int) -> Any:
    if not isinstance(entry, Mapping) or "byzantine" not in entry:
        return entry
    return {**entry, "byzantine": _fewer(entry["byzantine"], full, clients)}


def _stand_in(name: str, clients: int) -> dict[str, Any] | str:
    if name in ("digits", "ring"):
        return name
    if name == "cityscapes":
        return {"name": "scenes", "samples": _SAMPLES * clients, "test": 8, "cities": clients}
    channels, size = _SHAPES.get(name, _COLOUR)
    return {
        "name": "patterns",
        "channels": channels,
        "size": size,
        "classes": _CLASSES,
        "samples": _SAMPLES * clients,
        "test": 40,
    }


def _name(entry: Any) -> str:
    return str(entry["name"] if isinstance(entry, Mapping) else entry)
