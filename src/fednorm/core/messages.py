"""The values that a round takes and returns: what is sent and what stays on a client.

All are frozen. Engines own dictionaries and files; rounds own nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Self

from torch import Tensor

from fednorm.core.moments import Moments
from fednorm.core.types import ClientId, Tensors, nbytes


@dataclass(frozen=True, slots=True)
class RunningStats:
    """The running statistics of one layer, and how many batches they have followed."""

    mean: Tensor
    var: Tensor
    num_batches: int


@dataclass(frozen=True, slots=True)
class LayerStats:
    """What a client reports of one layer after a round.

    With `statistics="pool"` these are the moments of the layer's input during the round; with
    `statistics="average"` they are the client's own running statistics. `num_batches` is the
    layer's counter after the round: an integer, merged by the maximum.

    A client reports how many samples the values come from. The server multiplies the values per
    sample by the weight of the client's update: statistics and weights are averages over one
    population.
    """

    moments: Moments
    num_batches: int
    samples: float = 1.0  # behind the moments
    more: tuple[Moments, ...] = ()  # of further calls, if a step uses the layer more than once

    @property
    def calls(self) -> tuple[Moments, ...]:
        """The moments of each call of the layer in a step."""
        return (self.moments, *self.more)

    def join_calls(self) -> Moments:
        """Return one summary of all calls, each of which counts the same."""
        share = 1 / len(self.calls)
        return reduce(Moments.merge, (moments.scale(share) for moments in self.calls))

    def with_weight(self, examples: float) -> Self:
        """Return the report of a client whose update weighs `examples`."""
        first, *more = (
            replace(moments, weight=examples * moments.count / self.samples)
            for moments in self.calls
        )
        return replace(self, moments=first, more=tuple(more))


LARGEST = 2**53  # number of examples or values: beyond it, counting by ones fails
_MOST_BATCHES = 2**31  # that a layer can follow in one round
_MOST_CALLS = 1000  # of a layer in a step, if it is not known how a model uses it


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How a model uses a layer."""

    values: float  # of a channel, in one sample
    calls: int = 1  # in one step


@dataclass(frozen=True, slots=True)
class Claim:
    """The most that an honest client can report in a round, as far as the server knows.

    >>> Claim(examples=20, batches=3).limit_counter("conv1.bn", before=5)
    3005
    """

    examples: int = LARGEST  # its weight in averages
    samples: float = LARGEST  # behind the moments of a layer
    batches: int = _MOST_BATCHES  # that pass through the model
    layers: Mapping[str, LayerUse] = field(default_factory=dict)  # as far as it is known

    def limit_counter(self, path: str, before: int) -> int:
        """Return the largest counter of a layer after the round."""
        calls = self.layers[path].calls if path in self.layers else _MOST_CALLS
        return before + min(self.batches * calls, _MOST_BATCHES)

    def limit_count(self, path: str, samples: float | None) -> float:
        """Return the largest count of a layer's moments of `samples`; None: of its batches."""
        if path not in self.layers:
            return LARGEST
        use = self.layers[path]
        return self.batches * use.calls if samples is None else samples * use.values


@dataclass(frozen=True, slots=True)
class RejectedReply:
    """A reply that was not used, and why."""

    client: ClientId
    reason: str
    where: str = ""  # the layer or tensor that is at fault, if it is one


@dataclass(frozen=True, slots=True)
class ServerState:
    """The server's state after a round.

    >>> ServerState(round=3, weights={}, buffers={}, running={}).round
    3
    """

    round: int
    weights: Tensors  # shared parameters
    buffers: Tensors  # shared buffers outside normalization layers
    running: Mapping[str, RunningStats]  # by layer
    momentum: Tensors = field(default_factory=dict)  # or control variates: what clients start with
    # What the server's optimizer keeps, by kind and parameter; it is not broadcast.
    optimizer: Mapping[str, Tensors] = field(default_factory=dict)
    strategy_state: Tensors = field(default_factory=dict)  # what the strategy keeps
    rejected: tuple[RejectedReply, ...] = ()  # in the last round


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Server to client.

    >>> import fednorm
    >>> from torch import nn
    >>> task = fednorm.Task.build(
    ...     nn.BatchNorm1d(2), fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    ... )
    >>> fednorm.broadcast(task, task.initial_state).round
    1
    """

    state: ServerState  # after the last round
    rounds: int | None = None  # the planned number of rounds, if it is known

    @property
    def round(self) -> int:
        """The round that clients train in, counted from 1."""
        return self.state.round + 1


@dataclass(frozen=True, slots=True)
class Reply:
    """Client to server.

    >>> Reply(client=0, examples=20, update={}, buffers={}, stats={}).examples
    20
    """

    client: ClientId
    examples: int  # the client's weight in averages
    update: Tensors  # of the shared parameters
    buffers: Tensors  # shared buffers outside normalization layers, as they are now
    stats: Mapping[str, LayerStats]  # by layer
    momentum: Tensors = field(default_factory=dict)  # or what else the algorithm sends
    loss: float = 0.0  # mean over the client's steps
    metrics: Mapping[str, float] = field(default_factory=dict)  # a user's own
    round: int | None = None  # that it answers, if it says
    clients: float = 1  # whose replies it combines
    fault: str = ""  # why the engine could not read it, if so; the rest is empty then


@dataclass(frozen=True, slots=True)
class ClientState:
    """What a client keeps between its rounds.

    >>> ClientState().tensors  # of a client that has not trained
    {}
    """

    tensors: Tensors = field(default_factory=dict)  # personal parameters and statistics
    optimizer: Tensors = field(default_factory=dict)  # momentum or the like, by parameter


@dataclass(frozen=True, slots=True)
class Batches:
    """One client's mini-batches of one round.

    `steps` may be iterated more than once: a round with exchanges is replayed.

    >>> import torch
    >>> steps = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))]
    >>> Batches(client=0, steps=steps, examples=4).examples
    4
    """

    client: ClientId
    steps: Iterable[tuple[Tensor, Tensor]]
    examples: int  # that the client holds in all
    seed: int = 0  # of random draws inside the model, such as dropout
    # Of merged clients: the samples of each in the batch. Parts of equal size are interleaved: the
    # first sample of each client, then the second, …
    client_sizes: tuple[int, ...] = ()
    # All of the client's data once, for strategies that measure it before they train.
    all_data: Iterable[tuple[Tensor, Tensor]] | None = None
    batch_sizes: tuple[int, ...] = ()  # if they are known before the batches are made
    stacked: int = 1  # clients whose parameters are stacked along the first axis

    @property
    def all_steps(self) -> Iterable[tuple[Tensor, Tensor]]:
        """All of the client's data once, or its steps if `all_data` is not given."""
        return self.steps if self.all_data is None else self.all_data


_INTEGER = 8  # bytes of a count or a counter on the wire


def report_bytes(stats: Mapping[str, LayerStats]) -> int:
    """Return the payload of reported statistics in bytes."""
    moments = [moments for report in stats.values() for moments in report.calls]
    numbers = len(moments) + 2 * len(stats)  # counts, counters and samples
    return nbytes(t for m in moments for t in (m.mean, m.var)) + _INTEGER * numbers


def upload_bytes(reply: Reply) -> int:
    """Return the payload of a reply in bytes, without the envelope of any transport."""
    tensors = [*reply.update.values(), *reply.buffers.values(), *reply.momentum.values()]
    return nbytes(tensors) + report_bytes(reply.stats) + _INTEGER


def download_bytes(broadcast: Broadcast) -> int:
    """Return the payload of a broadcast in bytes, without the envelope of any transport."""
    state, running = broadcast.state, broadcast.state.running.values()
    parts = (state.weights, state.buffers, state.momentum, state.strategy_state)
    tensors = [tensor for part in parts for tensor in part.values()]
    stats = nbytes(t for r in running for t in (r.mean, r.var)) + _INTEGER * len(running)
    return nbytes(tensors) + stats + _INTEGER
