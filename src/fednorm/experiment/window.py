"""The batch statistics of each client over the last rounds, and how much they vary.

A window holds 200 vectors for each client that takes part in every round: 2 numbers for each
channel of the model's BatchNorm layers, which makes 1.1 MB for a client with ResNet-20 and 43 MB
with ResNet-50. Clients that take part less often hold less. An exact variance over the last rounds
needs the values that leave it; a running sum of squares would lose its digits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from fednorm.core.types import ClientId

WINDOW = 200  # rounds, as in Figure 3b of arXiv:2303.06530


@dataclass(frozen=True, slots=True)
class WindowMoments:
    """What one client reported within the window."""

    rounds: Tensor
    vectors: Tensor  # a row for each of these rounds
    variance: float | None = None  # summed over the entries of a vector


Window = Mapping[ClientId, WindowMoments]


def move_window(
    window: Window, round_: int, new: Mapping[ClientId, Tensor], length: int = WINDOW
) -> dict[ClientId, WindowMoments]:
    """Return the window that ends with a round in which clients reported `new`.

    An entry that is not a number stands for what a client did not report.
    """
    moved = {}
    for client in sorted({*window, *new}):
        seen = _move(window.get(client), round_ - length, round_, new.get(client))
        if len(seen.rounds):
            moved[client] = seen
    return moved


def mean_variance(window: Window) -> float | None:
    """Return the variance within a client, in the mean over clients with two reports or more."""
    found = [seen.variance for seen in window.values() if seen.variance is not None]
    return fmean(found) if found else None


def _move(
    seen: WindowMoments | None, after: int, round_: int, vector: Tensor | None
) -> WindowMoments:
    if seen and vector is None and seen.rounds[0] > after:
        return seen
    rounds, vectors = [], []
    if seen:
        gone = int((seen.rounds <= after).sum())
        rounds, vectors = [seen.rounds[gone:]], [seen.vectors[gone:]]
    if vector is not None:
        rounds, vectors = [*rounds, torch.tensor([round_])], [*vectors, vector[None]]
    rows = torch.cat(vectors)
    return WindowMoments(torch.cat(rounds), rows, _variance(rows))


def _variance(rows: Tensor) -> float | None:
    if len(rows) < 2:  # noqa: PLR2004 (one value has no variance)
        return None
    exact = rows.to(torch.float64, copy=True)
    mean = Tensor.nanmean if exact.sum().isnan() else Tensor.mean  # the one takes thrice as long
    exact -= mean(exact, 0)
    return float(mean(exact.square_(), 0).nansum())
