"""Secure sums: replies as integers, of which the server learns the sum over clients alone.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.

Client: writes what it would send so that a plain sum over clients is all that the server needs, in
fixed-point integers. Its examples e; e times its loss, update, momentum and change of buffers; of a
layer's inputs the moments in additive form around the shared mean r, with the weight w that they
have in a pool: their count, w, w(μ-r) and w(σ²+(μ-r)²). Running statistics, which are averaged, are
e, e(μ-r) and e·σ². A protocol would add a mask to each integer, and masks cancel in the sum.

Server: adds the integers modulo the word and divides. The result has the form of one reply.

Not here: the masks, keys and dropouts of a protocol. What is computed is what the server would see.
A counter is the rounded mean over clients, not the maximum; clients that take equally many steps
have the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from fednorm.core.messages import LayerStats, RejectedReply, Reply, RunningStats, ServerState
from fednorm.core.moments import Moments
from fednorm.core.replies.validation import (
    Fault,
    Rejected,
    ReplySchema,
    sort_by_client,
    validate_replies,
)
from fednorm.core.round import reply_schema
from fednorm.core.task import Task, select_reporting
from fednorm.core.types import ClientId
from fednorm.errors import NoUsableReplyError

# Updates are many: words of 64 bits. Statistics are few, and sums of squares are large.
WORD, FRACTION = 64, 30
WIDE_WORD, WIDE_FRACTION = 128, 40
FEWEST = 2  # clients in a sum: that of one is its reply
SUM: ClientId = -1  # whose reply a sum is

# What a client's statistics weigh: the values behind them, its examples, or its batches.
Weights: TypeAlias = Literal["values", "examples", "batches"]


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """A reply as integers, which can be added: what a client would mask and send.

    >>> one = EncodedReply(torch.tensor([2**63 - 1]), (5,))
    >>> one.add(EncodedReply(torch.tensor([1]), (2**128 - 4,)))
    EncodedReply(tensors=tensor([-9223372036854775808]), statistics=(1,))
    """

    tensors: Tensor  # modulo 2^64: int64, in which torch counts past the end
    statistics: tuple[int, ...]  # modulo 2^128

    def add(self, other: Self) -> Self:
        """Return the sum, modulo the words."""
        pairs = zip(self.statistics, other.statistics, strict=True)
        return type(self)(
            self.tensors + other.tensors, tuple((a + b) % 2**WIDE_WORD for a, b in pairs)
        )

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.tensors.nbytes + len(self.statistics) * WIDE_WORD // 8


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the replies of a round are written; all clients and the server know it."""

    expected: ReplySchema
    clients: int  # whose sum must fit
    weights: Weights
    calls: Mapping[str, int]  # of each layer in a step

    def encode(self, reply: Reply) -> EncodedReply | Fault:
        """Return a client's reply as integers, or what of it does not fit."""
        parts = [*self._list_values(reply)]
        words = torch.cat([values for _, values in parts]) * 2.0**FRACTION
        if words.abs().max() > (most := self._limit(WORD)):
            where, large = next(p for p in parts if (p[1].abs() * 2.0**FRACTION > most).any())
            said = f"{where!r}, as it is summed,"
            return where, self._describe(said, float(large.abs().max()), most / 2.0**FRACTION)
        wide: list[int] = []
        most = self._limit(WIDE_WORD)
        for path in self.expected.running:
            sums = self._list_statistics(path, reply)
            if (largest := max(map(abs, sums))) * 2.0**WIDE_FRACTION > most:
                said = f"a sum over the inputs of layer {path!r}"
                return path, self._describe(said, largest, most / 2.0**WIDE_FRACTION)
            wide += (round(value * 2.0**WIDE_FRACTION) % 2**WIDE_WORD for value in sums)
        return EncodedReply(words.round().to(torch.int64), tuple(wide))

    def _limit(self, word: int) -> int:
        """Return the largest integer of a client; sums leave a bit free for its rounding."""
        return (1 << word - 2) // self.clients

    def _describe(self, what: str, value: float, most: float) -> str:
        return (
            f"{what} is {value:.3g}, but {most:.3g} at most can be encoded such that the sum over "
            f"{self.clients} clients does not overflow"
        )

    def _list_values(self, reply: Reply) -> Iterator[tuple[str, Tensor]]:
        """Yield all numbers but statistics as flat vectors, multiplied by the examples."""
        examples = reply.examples
        yield "examples", torch.tensor([examples], dtype=torch.float64)
        yield "loss", torch.tensor([examples * reply.loss], dtype=torch.float64)
        for name in self.expected.update:
            yield name, examples * _flatten(reply.update[name])
        for name, like in self.expected.momentum.items():
            sent = name in reply.momentum  # not if it got no gradient
            values = examples * _flatten(reply.momentum[name]) if sent else 0 * _flatten(like)
            yield name, torch.cat([values.new_tensor([examples * sent]), values])
        for name, before in self.expected.buffers.items():
            whole = not before.is_floating_point()
            exact = torch.int64 if whole else torch.float64
            change = reply.buffers[name].to(exact) - before.to(exact)
            yield name, _flatten(change) * (1 if whole else examples)

    def _list_statistics(self, path: str, reply: Reply) -> list[float]:
        """Return one, the batches and the sums of a layer; zeros if it reports nothing."""
        before, report = self.expected.running[path], reply.stats.get(path)
        if report is None or not report.moments.count > 0:
            numbers = 2 + before.mean.numel() + before.var.numel()
            return [0.0] * (2 + self.calls[path] * numbers)
        batches = report.num_batches - before.num_batches
        values = [1.0, float(batches)]
        for moments in _list_calls(report.with_weight(reply.examples), self.calls[path]):
            weight = {"values": moments.mass, "examples": reply.examples, "batches": batches}
            mass = weight[self.weights]
            shift = _flatten(moments.mean) - _flatten(before.mean)
            square = _flatten(moments.var)
            if self.weights == "values" and square.numel():
                square = square + shift**2
            values += [float(moments.count), float(mass)]
            values += (mass * torch.cat([shift, square])).tolist()
        return values

    def decode(self, total: EncodedReply, clients: int) -> Reply:
        """Return the sum over `clients` as one reply: that of a client which has all their data."""
        expected = self.expected
        numbers = _Numbers(total.tensors.double() / 2.0**FRACTION)
        examples, loss = numbers.take(2).tolist()
        update = {n: numbers.take_like(t, examples) for n, t in expected.update.items()}
        momentum = dict[str, Tensor]()
        for name, like in expected.momentum.items():
            weight = float(numbers.take(1))
            mean = numbers.take_like(like, weight or 1.0)
            if weight > 0:
                momentum[name] = mean
        buffers = dict[str, Tensor]()
        for name, before in expected.buffers.items():
            if before.is_floating_point():
                buffers[name] = before + numbers.take_like(before, examples)
            else:
                change = numbers.take(before.numel()).view(before.shape) / clients
                buffers[name] = (before + change.round().to(before.device, torch.int64)).to(before)
        return Reply(
            SUM,
            round(examples),
            update,
            buffers,
            stats=self._decode_statistics(total.statistics),
            momentum=momentum,
            loss=loss / examples,
            clients=clients,
            round=expected.round,
        )

    def _decode_statistics(self, words: Sequence[int]) -> dict[str, LayerStats]:
        signed = (w - 2**WIDE_WORD if w >= 2 ** (WIDE_WORD - 1) else w for w in words)
        # An integer that is divided by a power of two: exact up to the float's rounding.
        numbers = iter([word / 2**WIDE_FRACTION for word in signed])
        stats = dict[str, LayerStats]()
        for path, before in self.expected.running.items():
            clients, batches = islice(numbers, 2)
            first, *more = [self._decode_call(before, numbers) for _ in range(self.calls[path])]
            if clients >= FEWEST:  # the layer's sum of one client is that client's
                counter = before.num_batches + max(1, round(batches / clients))
                stats[path] = LayerStats(first, counter, more=tuple(more))
        return stats

    def _decode_call(self, before: RunningStats, numbers: Iterator[float]) -> Moments:
        count, weight = islice(numbers, 2)
        first, second = (
            torch.tensor([*islice(numbers, like.numel())], dtype=torch.float64).view(like.shape)
            for like in (before.mean, before.var)
        )
        if not weight > 0:
            return Moments.empty(before.mean)
        shift, square = first / weight, second / weight
        if self.weights == "values" and square.numel():
            square = square - shift**2
        mean = before.mean.to(shift) + shift
        return Moments(count, mean.to(before.mean), square.clamp_min(0).to(before.var))


@dataclass(slots=True)
class _Numbers:
    """A vector that is read from its beginning."""

    left: Tensor

    def take(self, count: int) -> Tensor:
        """Return the next numbers."""
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def take_like(self, like: Tensor, weight: float) -> Tensor:
        """Return as many numbers as a tensor has, divided by `weight`, in its form."""
        return (self.take(like.numel()) / weight).view(like.shape).to(like)


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64).flatten()


def _list_calls(report: LayerStats, calls: int) -> tuple[Moments, ...]:
    """Return the moments of `calls` calls, or of all together if that is 1."""
    if len(report.calls) == calls:
        return report.calls
    return (report.join_calls(),)


def count_calls(replies: Sequence[Reply], paths: Collection[str]) -> dict[str, int]:
    """Return how often clients call each layer in a step; 1 if not all do equally often.

    It is public: a message's length shows it.
    """
    found: dict[str, set[int]] = {path: set() for path in paths}
    for reply in replies:
        for path in found.keys() & reply.stats.keys():
            found[path].add(len(reply.stats[path].calls))
    return {path: max(numbers) if len(numbers) == 1 else 1 for path, numbers in found.items()}


@dataclass(frozen=True, slots=True)
class SecureSum:
    """What the server sees of a round: the sum as one reply, and who is not in it."""

    reply: Reply
    rejected: Rejected
    bytes_up: float  # of one client


def sum_replies(
    task: Task,
    state: ServerState,
    replies: Sequence[Reply],
    *,
    asked: Collection[ClientId] | None = None,
    minimum: int = FEWEST,
) -> SecureSum:
    """Return the sum of the replies of a round, for `server_round`.

    A client checks its reply before it encodes it, and is left out by name if it cannot. Raises
    NoUsableReplyError if fewer than `minimum` clients are left, or than two.
    """
    averages = task.strategy.statistics == "average" and not task.strategy.measures
    clients = None if asked is None else frozenset(asked)
    expected = reply_schema(task, state, clients)
    return _encode_and_sum(expected, "examples" if averages else "values", replies, minimum)


def sum_calibration(
    task: Task,
    state: ServerState,
    replies: Sequence[Reply],
    *,
    asked: Collection[ClientId] | None = None,
) -> SecureSum:
    """Return the sum of the answers to a calibration, for `server_calibration`."""
    averages = task.strategy.calibration_rule().reports == "averages"
    clients = None if asked is None else frozenset(asked)
    expected = ReplySchema({}, running=select_reporting(task, state), clients=clients)
    return _encode_and_sum(expected, "batches" if averages else "values", replies, FEWEST)


def _encode_and_sum(
    expected: ReplySchema, weights: Weights, replies: Sequence[Reply], minimum: int
) -> SecureSum:
    good, rejected = validate_replies(replies, expected)
    calls = count_calls(good, expected.running)
    asked = len(replies) if expected.clients is None else len(expected.clients)
    encoding = Encoding(expected, max(1, asked), weights, calls)
    encoded, bad = list[EncodedReply](), list(rejected)
    for reply in good:
        made = encoding.encode(reply)
        if isinstance(made, EncodedReply):
            encoded.append(made)
        else:
            bad.append(RejectedReply(reply.client, made[1], where=made[0]))
    if len(encoded) < max(FEWEST, minimum):
        raise NoUsableReplyError(expected.round or 0, sort_by_client(bad), good=len(encoded))
    total = reduce(EncodedReply.add, encoded)
    reply = encoding.decode(total, len(encoded))
    return SecureSum(reply, sort_by_client(bad), float(total.nbytes))
