"""Exchanges in the middle of a round: one there-and-back message per site.

A site is a place in the computation that every client reaches once, such as "the mean of layer
conv1.bn in its first call". What is exchanged is a mean over clients weighted by counts; that mean
is its own adjoint, so the same operation serves the forward and the backward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fednorm.core.aggregation import Aggregator, weighted_mean


class Exchange(Protocol):
    """How a layer asks for a mean over all clients of this round."""

    def mean(self, site: str, value: Tensor, weight: float) -> Tensor:
        """Return the mean over clients of `value`, each weighing `weight`."""


@dataclass(frozen=True, slots=True)
class Solo:
    """The exchange of a client that is alone: its own value is the mean."""

    answers: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, site: str, value: Tensor, weight: float) -> Tensor:  # noqa: ARG002 (protocol)
        """Return the value itself."""
        self.answers[site] = value.detach()
        return value


class PendingError(Exception):
    """A client has reached a site whose answer is not known yet."""

    def __init__(self, site: str, value: Tensor, weight: float) -> None:
        super().__init__(f"waiting for the answer of {site}")
        self.site, self.value, self.weight = site, value, weight


@dataclass(frozen=True, slots=True)
class Replay:
    """Answers known sites, and stops the client at the first unknown one.

    The engine then averages the values that all clients sent, adds the answer and runs them again.
    Nothing is kept alive between the runs, so this works across machines; it costs one more run
    of the round for each site.
    """

    answers: Mapping[str, Tensor]

    def mean(self, site: str, value: Tensor, weight: float) -> Tensor:
        """Return the known answer of a site, or raise PendingError."""
        if site not in self.answers:
            raise PendingError(site, value.detach().clone(), weight)
        return self.answers[site]


def answer_exchange(
    pending: Sequence[PendingError], aggregate: Aggregator = weighted_mean
) -> Tensor:
    """Return the mean that answers a site at which all clients are waiting."""
    sites = {p.site for p in pending}
    if len(sites) != 1:
        raise RuntimeError(
            f"clients must wait at the same site, but they wait at {', '.join(sorted(sites))}; "
            "a model whose path depends on its data cannot be trained with layer-wise exchanges."
        )
    weights = torch.tensor([p.weight for p in pending], dtype=torch.float64)
    return aggregate(torch.stack([p.value for p in pending]), weights)
