"""What a layer does in a round: rules, the interface of layers that follow them, and exchanges.

A rule says how a layer treats a training batch. An exchange happens in the middle of a round: one
there-and-back message per site. A site is a place in the computation that every client reaches
once, such as "the mean of layer conv1.bn in its first call". What is exchanged is a mean over
clients weighted by counts; that mean is its own adjoint, so the same operation serves the forward
and the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fednorm.core.aggregation import Aggregator, weighted_mean
from fednorm.core.messages import LayerStats, RunningStats

Statistics: TypeAlias = Literal["average", "pool"]
Calibration: TypeAlias = Literal["never", "evaluation"]  # before what it takes place


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


@dataclass(slots=True)
class RoundContext:
    """What all layers of a model share during one round of one client."""

    exchange: Exchange = field(default_factory=Solo)
    step: int = -1  # which mini-batch of the round, counted from 0; -1 outside of training
    samples: int = 0  # of that mini-batch; 0 if unknown: layers then count the rows they see
    examples: int = 0  # the client's weight in averages
    client_sizes: tuple[int, ...] = ()  # as in `Batches`


@dataclass(frozen=True, slots=True)
class NormRule:
    """How a layer treats a training batch; called as `rule(layer, x)`.

    Args:
        normalize_with: the statistics that a batch is normalised with: its own ("batch"; where the
            batches of several clients are merged, those of each client's part), the shared running
            ones, which are constants ("shared"), those of all clients' batches ("synchronized"),
            or a function of several of these that cannot tell clients apart ("mixed").
        tracks: whether the layer's running statistics follow its batches, as in torch.
        reports: what the layer reports after a round: the client's running statistics ("running");
            the moments of its inputs, weighted as running statistics would weigh them ("moments");
            the moments of all inputs of a calibration pass, each of the same weight ("totals"); the
            mean over that pass's batches of their statistics ("averages"); or "nothing".
        normalize: the function that does it.
    """

    normalize_with: Literal["batch", "shared", "synchronized", "mixed"]
    tracks: bool
    reports: Literal["running", "moments", "totals", "averages", "nothing"]
    normalize: Callable[[Any, Tensor], Tensor] = field(repr=False)

    def __call__(self, layer: "NormLayer", x: Tensor) -> Tensor:
        """Normalise a batch of `layer`'s inputs."""
        return self.normalize(layer, x)


class NormLayer(nn.Module):
    """A layer that holds running statistics; the rule of the round says how it treats a batch."""

    momentum: float | None

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:
        """Start a round: forget what was recorded and follow `rule`."""
        raise NotImplementedError

    def report(self, statistics: Statistics) -> LayerStats | None:
        """Return the statistics of this round, or None if the rule recorded nothing."""
        raise NotImplementedError

    def read_running(self) -> RunningStats | None:
        """Return a copy of the running statistics, or None if the layer tracks none."""
        raise NotImplementedError

    def load_running(self, running: RunningStats) -> None:
        """Overwrite the running statistics."""
        raise NotImplementedError
