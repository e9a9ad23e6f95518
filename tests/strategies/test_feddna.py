"""FedDNA: the importance weights are the minimum they claim to be, and weigh as they should."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from fednorm import create_strategy
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.moments import Moments
from fednorm.core.task import Task
from fednorm.strategies.feddna import reweight
from support import ToyClients, assert_same_state, last, nested_model, task_of

EPS = 1e-5


def clients_of(counts, channels=4, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Moments(
            float(count),
            spread * torch.randn(channels, generator=generator, dtype=torch.float64),
            0.5 + torch.rand(channels, generator=generator, dtype=torch.float64),
        )
        for count in counts
    ]


def shares(moments):
    counts = torch.tensor([m.mass for m in moments], dtype=torch.float64)
    return counts / counts.sum()


def weights_of(moments, strength=1.0, iterations=100):
    return shares(reweight(moments, strength, iterations))


def objective(weights, moments, strength):
    """The sum to be minimised, term by term, with torch's own divergence of Gaussians."""
    mean = sum(w * m.mean for w, m in zip(weights, moments, strict=True))
    var = sum(w * (m.var + (m.mean - mean) ** 2) for w, m in zip(weights, moments, strict=True))
    pooled = Normal(mean, (var + EPS).sqrt())
    total = 0.0
    for w, share, m in zip(weights, shares(moments), moments, strict=True):
        if w > 0:
            own = Normal(m.mean, (m.var + EPS).sqrt())
            total += w * kl_divergence(own, pooled).mean() + w * torch.log(w / share) / strength
    return float(total)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_no_point_of_a_grid_on_the_simplex_is_better(seed, strength):
    moments = clients_of((30, 50, 20), seed=seed)
    found = weights_of(moments, strength)
    best = objective(found, moments, strength)
    n = 25
    for a in range(n + 1):
        for b in range(n + 1 - a):
            grid = torch.tensor([a, b, n - a - b], dtype=torch.float64) / n
            assert best <= objective(grid, moments, strength) + 1e-9
    assert objective(shares(moments), moments, strength) > best + 1e-6


def test_no_small_step_from_the_result_is_better():
    moments = clients_of((30, 50, 20, 7), seed=3)
    found = weights_of(moments)
    best = objective(found, moments, 1.0)
    for i in range(4):
        for j in range(4):
            step = torch.zeros(4, dtype=torch.float64)
            step[i] += 1e-3
            step[j] -= 1e-3
            assert best <= objective(found + step, moments, 1.0) + 1e-12


@pytest.mark.parametrize("strength", [0.5, 1.0, 4.0])
def test_no_iteration_raises_the_sum(strength):
    moments = clients_of((3, 9, 5, 2, 6), spread=2.0, seed=5)
    sums = [
        objective(weights_of(moments, strength, iterations), moments, strength)
        for iterations in range(1, 15)
    ]
    sums.insert(0, objective(shares(moments), moments, strength))
    assert all(after <= before + 1e-12 for before, after in pairwise(sums))
    assert sums[-1] < sums[0]


def test_equal_clients_get_equal_weights():
    (one,) = clients_of((8,))
    weights = weights_of([one] * 5)
    torch.testing.assert_close(weights, torch.full((5,), 0.2, dtype=torch.float64))
    unequal = [one.scale(factor) for factor in (1, 2, 5)]
    torch.testing.assert_close(weights_of(unequal), shares(unequal))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    shift=st.floats(0.5, 20),
    counts=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    strength=st.floats(0.1, 3),
)
def test_an_outlying_client_weighs_less_than_its_share(shift, counts, strength):
    """The others are the majority, and all alike."""
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    near = [Moments(float(c), mean, var) for c in counts]
    far = Moments(float(sum(counts)) / 2, mean + shift, var)
    moments = [*near, far]
    weights, share = weights_of(moments, strength, 20), shares(moments)
    assert weights[-1] < share[-1]
    assert bool((weights[:-1] > share[:-1]).all())


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    spread=st.floats(0, 5),
    strength=st.floats(0, 5),
    order=st.randoms(use_true_random=False),
)
def test_counts_keep_their_sum_and_follow_the_clients_order(counts, spread, strength, order):
    moments = clients_of(counts, spread=spread)
    weighted = reweight(moments, strength, 10)
    assert sum(m.mass for m in weighted) == pytest.approx(sum(counts))
    for before, after in zip(moments, weighted, strict=True):
        assert after.mean is before.mean
        assert after.var is before.var
    turn = list(range(len(counts)))
    order.shuffle(turn)
    turned = reweight([moments[i] for i in turn], strength, 10)
    for i, m in zip(turn, turned, strict=True):
        assert m.mass == pytest.approx(weighted[i].mass, rel=1e-6, abs=1e-9)


def test_units_do_not_matter():
    """A channel that is shifted and scaled on all clients changes no weight."""
    moments = clients_of((3, 9, 5))
    moved = [Moments(m.count, 100 + 50 * m.mean, 2500 * m.var) for m in moments]
    torch.testing.assert_close(weights_of(moments), weights_of(moved), rtol=0, atol=1e-4)


def test_finite_without_variance_and_alone():
    mean, zero = torch.tensor([1.0, -2.0]), torch.zeros(2)
    (alone,) = reweight([Moments(5.0, mean, zero)], 1.0, 10)
    assert alone.mass == 5
    same = reweight([Moments(5.0, mean, zero), Moments(3.0, mean, zero)], 1.0, 10)
    assert [m.mass for m in same] == pytest.approx([5, 3])
    # Dead on one client, alive on the others, and far apart in units of BatchNorm's epsilon.
    mixed = [Moments(5.0, mean, zero), Moments(5.0, mean + 1e4, zero), Moments(5.0, mean, zero + 1)]
    # Strong enough to let every factor underflow, were they not relative to the nearest client.
    for strength in (1.0, 1e6):
        assert sum(m.mass for m in reweight(mixed, strength, 10)) == pytest.approx(15)


def test_an_empty_client_has_no_say():
    empty = [*clients_of((4, 6)), Moments.empty(torch.zeros(4, dtype=torch.float64))]
    weighted = reweight(empty, 1.0, 10)
    assert weighted[2].mass == 0
    assert [m.mass for m in weighted[:2]] == [m.mass for m in reweight(empty[:2], 1.0, 10)]
    without = reweight([empty[2], empty[2]], 1.0, 10)
    assert [m.mass for m in without] == [0, 0]
    # Even if no client is as near to the pooled distribution as the client without a value.
    mean, zero = torch.full((4,), 9.0, dtype=torch.float64), empty[2].var
    apart = [Moments(5.0, -mean, zero), Moments(5.0, mean, zero), empty[2]]
    assert [m.mass for m in reweight(apart, 1e6, 1)] == pytest.approx([5, 5, 0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dsgd", "fedavg"])
def test_strength_zero_is_naive_with_pooled_statistics(kind):
    step = create_algorithm(kind, lr=0.05, momentum=0.9)
    clients = ToyClients(sizes=(3, 7, 4), steps=1 if kind == "dsgd" else 2)
    naive = last(task_of("naive", step, statistics="pool"), clients, 5).state
    zero = last(task_of("feddna", step, strength=0), clients, 5).state
    some = last(task_of("feddna", step), clients, 5).state
    for name, value in naive.weights.items():
        assert torch.equal(zero.weights[name], value)
        assert torch.equal(some.weights[name], value)  # decoupled: training does not see it
    for path, running in naive.running.items():
        assert torch.equal(zero.running[path].mean, running.mean)
        assert torch.equal(zero.running[path].var, running.var)
        assert zero.running[path].num_batches == running.num_batches
    # Clients differ most where nothing has been normalised yet.
    assert not torch.allclose(some.running["stem.1"].mean, naive.running["stem.1"].mean)
    assert not torch.allclose(some.running["stem.1"].var, naive.running["stem.1"].var)


def test_the_server_pools_with_the_weights():
    """After one round: statistics of the union, in which a client's values weigh more or less."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)).double()
    clients = ToyClients(sizes=(4, 6, 5), shape=(3,))
    task = task_of(
        "feddna", create_algorithm("dsgd", lr=0.05), model=model, strength=0.7, iterations=4
    )
    after = last(task, clients, 1).state.running["0"]
    xs = [clients.batches(c, 1).steps[0][0] for c in range(3)]
    w = list(shares([Moments(float(len(x)), x[0], x[0]) for x in xs]))
    for _ in range(4):
        mean = sum(w[i] * xs[i].mean(0) for i in range(3))
        var = sum(w[i] * ((xs[i] - mean) ** 2).mean(0) for i in range(3))
        raw = []
        for x in xs:
            own = Normal(x.mean(0), (x.var(0, correction=0) + EPS).sqrt())
            distance = kl_divergence(own, Normal(mean, (var + EPS).sqrt())).mean()
            raw.append(len(x) / 15 * math.exp(-0.7 * distance))
        w = [value / sum(raw) for value in raw]
    mean = sum(w[i] * xs[i].mean(0) for i in range(3))
    var = sum(w[i] * ((xs[i] - mean) ** 2).mean(0) for i in range(3))
    torch.testing.assert_close(after.mean, 0.1 * mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.var, 0.9 + 0.1 * var * 15 / 14, rtol=0, atol=1e-12)


def test_one_client_is_one_machine():
    """Plain torch, trained on the client's batches."""
    model, clients = nested_model().train(), ToyClients(sizes=(6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for round_ in range(1, 6):
        (x, y), *_ = clients.batches(0, round_).steps
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = task_of("feddna", create_algorithm("dsgd", lr=0.05))
    assert_same_state(last(task, clients, 5).state, model)


def test_a_robust_rule_has_the_last_word():
    """It looks at no weights, so the importance changes nothing."""
    median = create_aggregator("median", f=1)
    states = [
        last(
            Task.build(
                nested_model(), chosen, create_algorithm("dsgd"), statistics_aggregator=median
            ),
            ToyClients(),
            2,
        ).state
        for chosen in (create_strategy("feddna"), create_strategy("naive", statistics="pool"))
    ]
    for path, running in states[0].running.items():
        torch.testing.assert_close(running.mean, states[1].running[path].mean)
        torch.testing.assert_close(running.var, states[1].running[path].var)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strength": -0.1}, "strength must be 0 or more and finite, not -0.1"),
        ({"strength": float("nan")}, "strength must be 0 or more"),
        ({"strength": float("inf")}, "strength must be 0 or more"),
        ({"iterations": 0}, "iterations must be at least 1, not 0"),
        ({"stats_momentum": 0}, "stats_momentum must be in"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        create_strategy("feddna", **fields)
