"""Differential privacy at client level: clip what each client sends, add noise to the sums.

A client's contribution to a round is two vectors: its update, all parameters as one, and its
statistics, all layers as one. Statistics are in units of the shared ones r, v of the round before:
(μ-r)/√v and log(σ²/v), both 0 for a client that changes nothing. Where moments are pooled, σ² is
the mean squared distance from r, not from μ: otherwise the variance between clients would be lost,
and a channel that is constant on one client would have the logarithm of 0.

Each vector is clipped to an L2 norm, the clipped ones are added, all with the same weight, Gaussian
noise of `noise` times that norm is added to the sum, and the result is divided by the expected
number of clients, which is public, as all other numbers here are. So one client changes the two
sums by at most `clip` and `clip_statistics`. What a client says of examples, counts, counters and
losses is not used. All else that the server does is a function of the noisy means.

What it proves (`Privacy.find_epsilon`): divide the two sums by the standard deviations of their
noise, σ_u·clip and σ_s·clip_statistics. Together they are one vector with noise of variance 1, in
which a client has the norm √(σ_u⁻² + σ_s⁻²) at most. The two releases of a round are therefore one
Gaussian mechanism with the noise multiplier (σ_u⁻² + σ_s⁻²)^(-1/2), and if each client takes part
independently with probability q, one Poisson-sampled Gaussian mechanism; rounds are composed as
Rényi divergences (Mironov, 2017, arXiv:1702.07476; Mironov et al., 2019, arXiv:1908.10530), by the
accountant of Opacus. Neighbouring federations differ by one client.
"""

import importlib.util
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fednorm.core.aggregation import Aggregator
from fednorm.core.algorithm import Algorithm
from fednorm.core.layout import Layout
from fednorm.core.messages import LayerStats, Reply, RunningStats, ServerState
from fednorm.core.moments import Moments
from fednorm.core.random_streams import Stream
from fednorm.core.replies.validation import ReplySchema, validate_replies
from fednorm.core.strategy import Strategy
from fednorm.core.types import Tensors
from fednorm.errors import ConfigError

log = logging.getLogger("fednorm")

_EPS = 1e-5  # added to variances, as BatchNorm does: smaller ones are invisible to it
_LARGEST = 30.0  # logarithm of a ratio of variances, so that its exponential is finite
# Of Rényi divergences, from which the accountant takes the best. Small ones are the best where the
# noise is small; where it is large and clients are sampled, it takes seconds for each that is not
# whole: ε is an upper bound all the same, but a looser one.
_WHOLE = (*range(2, 64), 72, 96, 128, 192, 256, 512, 1024)
_BROKEN = tuple(1 + x / 10 for x in range(1, 100) if x % 10)
_LARGE_NOISE = 10.0


@dataclass(frozen=True, slots=True)
class Privacy:
    """How private rounds are; every number in it is public, except the seed.

    Args:
        clip: the largest L2 norm of a client's update.
        noise: standard deviation of the noise on the sum of updates, in units of `clip`.
        clients: the expected number of clients in a round, by which sums are divided.
        clip_statistics: the largest L2 norm of a client's statistics, in shared units.
        noise_statistics: as `noise`, of statistics; the same if it is None.
        rate: the probability with which a client takes part in a round, independently of others.
        batches: by how much the counters of batches advance in a round.
        delta: the δ of the guarantee.
        seed: of the noise; whoever knows it can subtract the noise. It serves one run alone, and
            each round of it once: two releases with the same noise tell their difference.

    >>> private = Privacy(clip=1.0, noise=1.0, clients=10, rate=0.1)
    >>> round(private.find_epsilon(rounds=100, statistics=True), 1)
    16.1
    """

    clip: float
    noise: float
    clients: float
    clip_statistics: float = 1.0
    noise_statistics: float | None = None
    rate: float = 1.0
    batches: int = 1
    delta: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clip", "clip_statistics", "clients"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}.")
        for name in ("noise", "statistics_multiplier"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}.")
        if not (0 < self.rate <= 1 and 0 < self.delta < 1):
            raise ValueError(
                f"rate is in (0, 1] and delta in (0, 1), unlike {self.rate} and {self.delta}."
            )

    @property
    def statistics_multiplier(self) -> float:
        """The noise multiplier of statistics."""
        return self.noise if self.noise_statistics is None else self.noise_statistics

    def find_multiplier(self, *, statistics: bool) -> float:
        """Return the noise multiplier of a round, whose clients send `statistics` or do not.

        >>> Privacy(clip=1.0, noise=3.0, noise_statistics=4.0, clients=10).find_multiplier(
        ...     statistics=True
        ... )
        2.4
        """
        parts = [self.noise, *([self.statistics_multiplier] if statistics else [])]
        if not all(parts):
            return 0.0
        return float(sum(noise**-2 for noise in parts) ** -0.5)

    def find_epsilon(self, rounds: int, *, statistics: bool) -> float | None:
        """Return the ε of `rounds` rounds, or None if without noise there is no guarantee."""
        multiplier = self.find_multiplier(statistics=statistics)
        if not multiplier:
            return None
        require_accountant()
        from opacus.accountants import RDPAccountant  # type: ignore[import-untyped]  # noqa: PLC0415 (an extra)

        accountant = RDPAccountant()
        accountant.history = [(multiplier, self.rate, rounds)] if rounds else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the best order is the first or the last
            epsilon = float(
                accountant.get_epsilon(self.delta, alphas=self._list_orders(multiplier))
            )
        return max(epsilon, 0.0) if math.isfinite(epsilon) else None

    def _list_orders(self, multiplier: float) -> list[float]:
        costly = self.rate < 1 and multiplier >= _LARGE_NOISE
        return [*(() if costly else _BROKEN), *_WHOLE]


def require_accountant() -> None:
    """Raise ConfigError unless the accountant is installed."""
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError(
            "privacy needs the accountant of Opacus, which is not installed; in a checkout of "
            'fednorm: pip install ".[privacy]".'
        )


def refuse_leaks(
    strategy: Strategy, algorithm: Algorithm, layout: Layout, rules: Sequence[Aggregator]
) -> None:
    """Raise ValueError if clients would send what is neither clipped nor noised."""
    reason = next(_list_leaks(strategy, algorithm, layout, rules), None)
    if reason:
        raise ValueError(f"privacy cannot be kept: {reason}.")


def _list_leaks(
    strategy: Strategy, algorithm: Algorithm, layout: Layout, rules: Sequence[Aggregator]
) -> Iterator[str]:
    who = type(strategy).__name__
    if strategy.exchanges:
        yield f"{who} exchanges statistics of batches within a round; choose another strategy"
    if strategy.calibration != "never":
        yield f"{who} measures clients' data for every test; choose another strategy"
    if strategy.measures:
        yield f"{who} measures clients' data before they train; choose another strategy"
    if not strategy.merges_sums:
        yield f"{who} weighs clients by their statistics, a sum is not enough; choose another one"
    for path, layer in layout.sharing.items():
        running = layer.read_running()
        if running is not None and not running.var.numel():
            yield f"{who} shares means without a variance as their unit, such as {path!r}"
    if algorithm.sends(layout.shared):
        what = f"{type(algorithm).__name__}'s clients send more than an update"
        yield f"{what}; choose 'fedavg' with momentum_state = 'local' or 'reset'"
    for name in layout.buffers:
        yield f"clients send the buffer {name!r} of the model; make it persistent=False"
    if not all(rule.uses_weights for rule in rules):
        yield "robust rules depend on every client; choose 'mean', clipping bounds each client"


def make_neutral_reply(state: ServerState, expected: ReplySchema) -> Reply:
    """Return the reply of a client that changes nothing."""
    return Reply(
        client=-1,
        examples=1,
        update={name: torch.zeros_like(like) for name, like in expected.update.items()},
        buffers=state.buffers,
        stats={
            path: LayerStats(Moments(1.0, r.mean, r.var), r.num_batches)
            for path, r in expected.running.items()
        },
    )


@torch.no_grad()
def release_mean(
    privacy: Privacy,
    state: ServerState,
    replies: Sequence[Reply],
    expected: ReplySchema,
    *,
    pools: bool,
) -> Reply:
    """Return the noisy mean of the clients' clipped replies, as one reply of weight 1.

    A faulty reply counts as one that changes nothing: its sender is logged, but not published.
    `pools` says whether statistics are moments, or else running statistics.
    """
    good, rejected = validate_replies(replies, expected)
    number = state.round + 1
    for one in rejected:
        log.info("round %d: the reply of client %d is rejected: %s", number, one.client, one.reason)
    released = replace(make_neutral_reply(state, expected), clients=privacy.clients)
    update = sum_clipped_vectors((_flatten(r.update, expected.update) for r in good), privacy.clip)
    rng = np.random.default_rng([privacy.seed, number, Stream.UPDATE_NOISE])
    scale = privacy.noise * privacy.clip
    mean = _add_noise(update, _flatten(released.update, expected.update), scale, rng)
    released = replace(released, update=_unflatten(mean / privacy.clients, expected.update))
    if not expected.running:
        return released
    told = (_measure_layers(r, expected, pools=pools) for r in good)
    statistics = sum_clipped_vectors(told, privacy.clip_statistics)
    rng = np.random.default_rng([privacy.seed, number, Stream.STATISTICS_NOISE])
    scale = privacy.statistics_multiplier * privacy.clip_statistics
    mean = _add_noise(statistics, _measure_layers(released, expected, pools=False), scale, rng)
    stats = _make_reports(mean / privacy.clients, expected, privacy.batches, pools=pools)
    return replace(released, stats=stats)


def sum_clipped_vectors(vectors: Iterator[Tensor], bound: float) -> Tensor | None:
    """Return the sum of vectors, each scaled down to the norm `bound`; None if there are none.

    >>> sum_clipped_vectors(iter([torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])]), 1.0)
    tensor([0.6000, 1.3000])
    """
    total: Tensor | None = None
    for vector in vectors:
        # A norm that overflows scales its vector to 0, and what is infinite in it is 0 as well:
        # a contribution within the bound.
        length = float(torch.linalg.vector_norm(vector))
        own = vector if length <= bound else (vector * (bound / length)).nan_to_num(0.0, 0.0, 0.0)
        total = own if total is None else total + own
    return total


def _add_noise(
    total: Tensor | None, like: Tensor, scale: float, rng: np.random.Generator
) -> Tensor:
    noise = torch.from_numpy(rng.standard_normal(len(like))).to(like) * scale
    return noise if total is None else total + noise


def _flatten(tensors: Tensors, names: Tensors) -> Tensor:
    """Return tensors as one vector in double precision, in the order of `names`."""
    parts = [tensors[name].flatten().double() for name in names]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _unflatten(vector: Tensor, like: Tensors) -> dict[str, Tensor]:
    pieces = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {
        name: piece.view(tensor.shape).to(tensor)
        for piece, (name, tensor) in zip(pieces, like.items(), strict=True)
    }


def _measure_layers(reply: Reply, expected: ReplySchema, *, pools: bool) -> Tensor:
    """Return a client's statistics in units of the shared ones; 0 where it reports none."""
    parts: list[Tensor] = []
    for path, before in expected.running.items():
        mean, var = before.mean.double(), before.var.double() + _EPS
        report = reply.stats.get(path)
        if report is None or not report.moments.count:
            parts += [torch.zeros_like(mean), torch.zeros_like(var)]
            continue
        own = report.join_calls()
        shift = own.mean.double() - mean
        seen = own.var.double() + (shift**2 if pools else 0)
        parts += [shift / var.sqrt(), ((seen + _EPS) / var).log()]
    return torch.cat(parts)


def _make_reports(
    mean: Tensor, expected: ReplySchema, batches: int, *, pools: bool
) -> dict[str, LayerStats]:
    """Map the mean over clients from shared units back to means and variances."""
    sizes = [r.mean.numel() for r in expected.running.values() for _ in range(2)]
    pieces = iter(torch.split(mean, sizes))
    return {
        path: LayerStats(
            _map_back(next(pieces), next(pieces), before, pools=pools),
            before.num_batches + batches,
        )
        for path, before in expected.running.items()
    }


def _map_back(shift: Tensor, ratio: Tensor, before: RunningStats, *, pools: bool) -> Moments:
    unit = before.var.double() + _EPS
    seen = unit * ratio.clamp(-_LARGEST, _LARGEST).exp() - _EPS
    var = seen - unit * shift**2 if pools else seen
    mean = before.mean.double() + unit.sqrt() * shift
    # A count of 1: no factor n/(n-1), because the number of values is the clients' secret.
    return Moments(1.0, mean.to(before.mean), var.clamp_min(0).to(before.var))
