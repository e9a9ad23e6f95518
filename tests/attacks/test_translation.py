"""Attacks corrupt running statistics, as in FBN's Algorithm 2.

The oracle is that algorithm in numpy, lines 4 to 10, with clients that send false r_i and v_i.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from fednorm import ClientState, broadcast, client_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.attacks import create_attack
from fednorm.attacks.adversary import Adversary, apply_attack, find_tracked_layers
from fednorm.core.messages import Batches
from fednorm.core.task import Task
from fednorm.engines.base import Faults
from fednorm.engines.loop import rounds
from fednorm.strategies import create_strategy
from support import ToyClients, task_of

N, CHANNELS, BETA = 10, 3, 0.1
BYZANTINE = [1, 4, 7]
HONEST = [i for i in range(N) if i not in BYZANTINE]
EXACT = {"rtol": 0, "atol": 1e-10}


@dataclass(frozen=True)
class Source:
    """Clients whose data differ in mean and scale; the first layer sees them unchanged."""

    sizes: tuple[int, ...] = (6,) * N
    steps: int = 1
    dtype: torch.dtype = torch.float64
    absent: int | None = None  # a client that takes part in odd rounds only

    def all(self):
        return list(range(N))

    def participants(self, round_):
        return [i for i in range(N) if i != self.absent or round_ % 2]

    def values(self, client, round_):
        rng = np.random.default_rng([client, round_])
        shape = (self.steps, self.sizes[client], CHANNELS)
        # Not all of one sign: a flipped value may be among the honest ones.
        mean = np.array([3.0, 0.5, -1.0]) + 0.5 * (client - 4)
        return mean + (1 + 0.2 * client) * rng.normal(size=shape)

    def batches(self, client, round_):
        labels = torch.zeros(self.sizes[client], dtype=torch.int64)
        x = torch.from_numpy(self.values(client, round_)).to(self.dtype)
        return Batches(client, [(one, labels) for one in x], self.sizes[client])


def run(source, attack, count, *, rule="mean", algo="dsgd", **fields):
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2)).to(source.dtype)
    task = Task.build(
        model,
        create_strategy("fbn", **fields),
        create_algorithm(algo, lr=0.01),
        rounds=count,
        statistics_aggregator=create_aggregator(rule, len(BYZANTINE)),
    )
    adversary = Adversary(attack, frozenset(BYZANTINE), "statistics", seed=0)
    found = [r.state.running["0"] for r in rounds(task, source, count, faults=Faults(adversary))]
    return [r.mean.numpy() for r in found], [r.var.numpy() for r in found]


def mean_rule(x):
    return x.mean(0)


def median_rule(x):
    return np.median(x, axis=0)


def trimmed_rule(x):
    return np.sort(x, axis=0)[len(BYZANTINE) : -len(BYZANTINE)].mean(0)


RULES = {"mean": mean_rule, "median": median_rule, "trimmed_mean": trimmed_rule}


def flip(means, variances, _smallest):
    means[BYZANTINE] *= -1
    return means, variances


def fall_of_empires(means, variances, smallest):
    means[BYZANTINE] = -2 * means[HONEST].mean(0)
    variances[BYZANTINE] = smallest  # -2 times the mean, as far as moments allow
    return means, variances


def little_is_enough(means, variances, _smallest):
    supporters = N // 2 + 1 - len(BYZANTINE)
    z = NormalDist().inv_cdf((len(HONEST) - supporters) / len(HONEST))
    for sent in (means, variances):
        sent[BYZANTINE] = sent[HONEST].mean(0) - z * sent[HONEST].std(0)
    return means, variances


CORRUPTIONS = {"sign_flip": flip, "foe": fall_of_empires, "alie": little_is_enough}


def algorithm_2(source, corrupt, count, rule, momentum=BETA):
    """Yield the shared running mean and variance after each round."""
    r, v = np.zeros(CHANNELS), np.ones(CHANNELS)
    for t in range(1, count + 1):
        beta = 1 / t if momentum is None else momentum
        batches = np.stack([source.values(i, t)[0] for i in range(N)])
        k = batches.shape[1]
        unbias = k * N / (k * N - 1)
        means = (1 - beta) * r + beta * batches.mean(1)
        variances = (1 - beta) * v + beta * unbias * batches.var(1)
        means, variances = corrupt(means, variances, (1 - beta) * v)
        r = rule(means)
        v = rule(variances) + unbias / beta * rule((means - r) ** 2)
        yield r, v


def check(found, expected):
    for mean, var, (r, v) in zip(*found, expected, strict=True):
        np.testing.assert_allclose(mean, r, **EXACT)
        np.testing.assert_allclose(var, v, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("momentum", [BETA, None])
def test_the_server_ends_where_algorithm_2_does(name, rule, momentum):
    found = run(Source(), create_attack(name), 8, rule=rule, stats_momentum=momentum)
    check(found, algorithm_2(Source(), CORRUPTIONS[name], 8, RULES[rule], momentum))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["nnm > median", "krum", "multi_krum", "centered_clipping"])
def test_rules_for_vectors_see_moments_as_they_would_see_running_statistics(text):
    def rule(x):
        return create_aggregator(text, len(BYZANTINE))(torch.from_numpy(x), torch.ones(N)).numpy()

    found = run(Source(), create_attack("sign_flip"), 8, rule=text)
    check(found, algorithm_2(Source(), flip, 8, rule))


def test_a_variance_out_of_reach_is_sent_as_the_smallest_that_is_accepted():
    """Algorithm 2 itself would take a running variance of 0, and so would end below."""

    def zero(means, variances, _smallest):
        return fall_of_empires(means, variances, 0.0)

    _, variances = run(Source(), create_attack("foe"), 1)
    ((_, v),) = algorithm_2(Source(), zero, 1, mean_rule)
    np.testing.assert_allclose(variances[0] - v, len(BYZANTINE) / N * (1 - BETA) * 1.0, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "r", "v"),
    [("mean", 0.1875, 19.457), ("median", 3.0, 1.0), ("nnm > median", 3.0, 1.0)],
)
def test_the_fixed_point_of_sign_flipping(rule, r, v):
    """Mean 3 and variance 1 everywhere: r = 0.4(0.9r + 0.3), and v follows from the spread."""

    class Same(Source):
        def values(self, client, round_):
            del client, round_
            return np.repeat([2.0, 4.0], 50)[None, :, None].repeat(CHANNELS, axis=2)

    means, variances = run(Same(sizes=(100,) * N), create_attack("sign_flip"), 120, rule=rule)
    np.testing.assert_allclose(means[-1], r, atol=1e-4)
    np.testing.assert_allclose(variances[-1], v, rtol=2e-3)


def expected_round(source, round_, r, v, momentum):
    """One round of E steps with flipped running means, each client weighing its batch."""
    rate = 1 - (1 - momentum) ** source.steps
    step = momentum * (1 - momentum) ** np.arange(source.steps)[::-1] / rate
    here = source.participants(round_)
    weights = np.array([source.sizes[i] for i in here], float)
    count, weights = weights.sum(), weights[:, None] / weights.sum()
    means, variances = [], []
    for i in here:
        batches = source.values(i, round_)
        mean = step @ batches.mean(1)
        var = step @ (batches**2).mean(1) - mean**2
        own = (1 - rate) * r + rate * mean
        means.append(-own if i in BYZANTINE else own)
        variances.append((1 - rate) * v + rate * count / (count - 1) * var)
    after = (weights * means).sum(0)
    between = (weights * (np.array(means) - after) ** 2).sum(0)
    return after, (weights * variances).sum(0) + count / (count - 1) / rate * between


@pytest.mark.parametrize("momentum", [BETA, 0.02])
def test_local_steps_unequal_clients_and_absent_ones_as_users_run_it(momentum):
    sizes = (6, 9, 4, 5, 8, 6, 7, 12, 3, 6)
    source = Source(sizes, steps=3, dtype=torch.float32, absent=2)
    found = run(source, create_attack("sign_flip"), 6, algo="fedavg", stats_momentum=momentum)
    r, v = np.zeros(CHANNELS), np.ones(CHANNELS)
    for t, (mean, var) in enumerate(zip(*found, strict=True), start=1):
        r, v = expected_round(source, t, r, v, momentum)
        np.testing.assert_allclose(mean, r, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(var, v, rtol=1e-4)


def replies_of(name, *, steps=1, sizes=(5, 4, 6, 5, 3), **fields):
    task = task_of(name, create_algorithm("fedavg", lr=0.05), **fields)
    # Statistics that have moved: at r = 0 a flipped running mean is a flipped mean.
    running = {
        path: replace(one, mean=one.mean + 0.7, var=one.var + 0.3, num_batches=4)
        for path, one in task.initial_state.running.items()
    }
    received = broadcast(task, replace(task.initial_state, running=running))
    clients = ToyClients(sizes=sizes, steps=steps)
    own = [client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(5)]
    return own, received, find_tracked_layers(task, received)


def corrupted(name, replies, tracked, byzantine=(1, 4), **fields):
    adversary = Adversary(create_attack(name, **fields), frozenset(byzantine), "statistics", seed=3)
    return apply_attack(replies, adversary, 1, tracked=tracked)


@pytest.mark.parametrize("name", ["alie", "mimic"])
def test_attacks_that_combine_honest_clients_are_the_same_on_moments(name):
    replies, _, tracked = replies_of("fbn", steps=2)
    on_running, on_moments = (corrupted(name, replies, f) for f in (tracked, {}))
    for path, one in on_running[1].stats.items():
        other = on_moments[1].stats[path].moments
        torch.testing.assert_close(one.moments.mean, other.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.moments.var, other.var, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "false_mean", "false_var"),
    [
        ("sign_flip", lambda r: -r, lambda v: v),
        ("replacement", lambda r: 2.5 * r, lambda v: 6.25 * v),
    ],
)
def test_the_moments_sent_make_the_false_running_statistics(name, false_mean, false_var):
    replies, received, tracked = replies_of("fbn", steps=2)
    found = corrupted(name, replies, tracked)
    rate = 1 - 0.9**2
    for path, report in replies[4].stats.items():
        before, changed, own = received.state.running[path], found[4].stats[path], report.moments
        for old, true, sent, false in (
            (before.mean, own.mean, changed.moments.mean, false_mean),
            (before.var, own.var, changed.moments.var, false_var),
        ):
            expected = false((1 - rate) * old + rate * true)
            torch.testing.assert_close((1 - rate) * old + rate * sent, expected)
        assert (changed.num_batches, changed.moments.count) == (report.num_batches, own.count)


def test_noise_is_that_of_running_statistics():
    replies, received, tracked = replies_of("fbn")
    found = corrupted("gaussian", replies, tracked, std=2.0)
    path = next(iter(replies[1].stats))
    sent, before = found[1].stats[path].moments, received.state.running[path]
    noise = corrupted("gaussian", replies, {}, std=2.0)[1].stats[path].moments  # the same draws
    torch.testing.assert_close(0.9 * before.mean + 0.1 * sent.mean, noise.mean)
    reached = torch.maximum(noise.var, 0.9 * before.var)
    torch.testing.assert_close(0.9 * before.var + 0.1 * sent.var, reached)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_non_finite_values_stay_non_finite(value):
    replies, _, tracked = replies_of("fbn")
    for report in corrupted("non_finite", replies, tracked, value=value)[1].stats.values():
        assert not report.moments.mean.isfinite().any()
        assert not report.moments.var.isfinite().any()


def test_backward_means_are_followed_with_their_own_momentum():
    replies, received, tracked = replies_of("dualbn", backward_momentum=0.4)
    found = corrupted("sign_flip", replies, tracked)
    backward = [path for path, r in replies[1].stats.items() if not r.moments.var.numel()]
    assert backward
    for path in backward:
        before, true = received.state.running[path].mean, replies[1].stats[path].moments.mean
        sent = found[1].stats[path].moments
        torch.testing.assert_close(0.6 * before + 0.4 * sent.mean, -(0.6 * before + 0.4 * true))
        assert sent.var.shape == (0,)


def test_the_rate_is_the_servers_where_clients_take_unequal_steps():
    """It counts as many batches as the client with the most of them."""
    replies, received, tracked = replies_of("fbn")
    longer = {p: replace(r, num_batches=r.num_batches + 2) for p, r in replies[0].stats.items()}
    found = corrupted("sign_flip", [replace(replies[0], stats=longer), *replies[1:]], tracked)
    rate = 1 - 0.9**3
    for path, report in replies[1].stats.items():
        before, sent = received.state.running[path].mean, found[1].stats[path].moments.mean
        true = (1 - rate) * before + rate * report.moments.mean
        torch.testing.assert_close((1 - rate) * before + rate * sent, -true)


def test_running_statistics_and_moments_that_nothing_follows_are_attacked_as_they_are():
    for name, fields in (("naive", {}), ("fbn", {"statistics": "average"})):
        assert replies_of(name, **fields)[2] == {}
    replies, _, tracked = replies_of("fbn")
    still = {path: replace(one, momentum=0.0) for path, one in tracked.items()}
    for path, report in corrupted("sign_flip", replies, still)[1].stats.items():
        assert torch.equal(report.moments.mean, -replies[1].stats[path].moments.mean)
