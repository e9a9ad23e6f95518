"""A user's own data set, named as "package.module:function"."""

from collections.abc import Mapping
from typing import Any

from fednorm.core.own import call_own
from fednorm.data.dataset import Dataset


def load_own(name: str, seed: int, fields: Mapping[str, Any]) -> Dataset:
    """Call the user's function, with the seed if it takes one, and return its data."""
    data = call_own("data set", name, {"seed": seed}, fields)
    if not isinstance(data, Dataset):
        raise TypeError(
            f"data set {name!r} must return a fednorm.data.Dataset, but returned "
            f"{type(data).__name__}; make one of its tensors."
        )
    return data
