"""What `partition` checks of what it is given and of what it returns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fednorm.data.partition.base import Indices


def as_labels(labels: Tensor | Sequence[int] | NDArray[Any]) -> Indices:
    """Return labels as a one-dimensional int64 array.

    >>> as_labels([2, 0, 1]).tolist()
    [2, 0, 1]
    """
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "a partition needs one integer label per sample, but got an array of shape "
            f"{array.shape} and type {array.dtype}; pass class numbers, not one-hot rows or scores."
        )
    return array.astype(np.int64)


def check_request(name: str, samples: int, clients: int, groups: NDArray[Any] | None) -> None:
    """Check that samples can be divided among so many clients at all."""
    if clients < 1:
        raise ValueError(f"partition {name!r} needs at least 1 client, but got {clients}.")
    if clients > samples:
        raise ValueError(
            f"partition {name!r} cannot give each of {clients} clients a sample: there are "
            f"{samples}; choose fewer clients or more samples."
        )
    if groups is not None and len(groups) != samples:
        raise ValueError(
            f"partition {name!r} needs one group per sample, but got {len(groups)} groups "
            f"for {samples} samples."
        )


def check_parts(name: str, parts: Sequence[Indices], samples: int) -> None:
    """Check that every client has data and that every sample is used exactly once."""
    for client, part in enumerate(parts):
        if not len(part):
            raise ValueError(
                f"client {client} has no data: partition {name!r} gave it none of {samples} "
                f"samples for {len(parts)} clients; choose fewer clients, another seed, or a "
                "milder heterogeneity (a larger alpha or fraction)."
            )
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples)):
        raise ValueError(
            f"partition {name!r} must use each of {samples} samples exactly once, but did not; "
            "its split is at fault."
        )
