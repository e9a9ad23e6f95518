"""A user's own model, named as "package.module:function"."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fednorm.core.own import call_own


def build_own(name: str, offered: Mapping[str, Any], fields: Mapping[str, Any]) -> nn.Module:
    """Call the user's function with shape and classes, if it takes them, and return its network."""
    model = call_own("model", name, offered, fields)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {name!r} must return a torch.nn.Module, but returned "
            f"{type(model).__name__}; return the network itself."
        )
    return model
