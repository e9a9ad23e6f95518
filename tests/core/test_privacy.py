"""Private rounds: clipping and noise against plain numpy, sensitivity, ε, and what is refused."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from torch import nn

from core import private_oracle as oracle
from fednorm import ClientState, Privacy, Task, broadcast, client_round, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import LayerStats, Reply
from fednorm.core.moments import Moments
from fednorm.core.replies import privacy as private
from fednorm.core.replies.privacy import release_mean
from fednorm.core.round import reply_schema
from fednorm.errors import ConfigError, NoUsableReplyError
from fednorm.strategies import create_strategy
from support import ToyClients, nested_model

HARD = {"clip": 0.3, "clip_statistics": 0.7, "noise": 0.5, "noise_statistics": 0.8, "clients": 2.5}
SETTINGS = {**HARD, "seed": 7}
BETA = 0.1


def make_task(name, algorithm="fedavg", *, model=None, rules=(), **fields):
    """A private task of a nested network in float64."""
    chosen = create_strategy(name) if isinstance(name, str) else name
    keys = ("aggregator", "statistics_aggregator")
    return Task.build(
        model or nested_model(),
        chosen,
        algorithm if not isinstance(algorithm, str) else create_algorithm(algorithm, lr=0.05),
        rounds=20,
        privacy=Privacy(**{**SETTINGS, **fields}),
        **dict(zip(keys, rules, strict=False)),
    )


def train(task, clients, state):
    """Return the replies of all clients in the round after `state`."""
    sent = broadcast(task, state)
    chosen = clients.participants(sent.round)
    return [
        client_round(task, sent, ClientState(), clients.batches(c, sent.round))[0] for c in chosen
    ]


def to_numpy(reply):
    """A reply as the oracle reads it."""
    stats = {path: report.moments for path, report in reply.stats.items()}
    return {
        "update": {name: t.numpy() for name, t in reply.update.items()},
        "mean": {path: moments.mean.numpy() for path, moments in stats.items()},
        "var": {path: moments.var.numpy() for path, moments in stats.items()},
    }


def read_running(state):
    return {p: (r.mean.numpy().copy(), r.var.numpy().copy()) for p, r in state.running.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pooled"), [("fbn", True), ("naive", False), ("gn", None)])
@pytest.mark.parametrize("loose", [False, True])
def test_private_rounds_are_what_plain_numpy_computes(name, pooled, loose):
    """Two rounds of unequal clients and steps, with clipping of all clients, and of none."""
    bounds = {"clip": 1e3, "clip_statistics": 1e3, "noise": 1e-4, "noise_statistics": 2e-4}
    used = {**SETTINGS, **(bounds if loose else {"clip": 0.01})}
    task, clients = make_task(name, batches=3, **used), ToyClients(sizes=(3, 9, 5), steps=3)
    state = task.initial_state
    for number in (1, 2):
        replies = train(task, clients, state)
        told, running = [to_numpy(reply) for reply in replies], read_running(state)
        names = list(state.weights)
        if pooled is None:
            running = {}
        if not loose:
            norms = [np.linalg.norm(oracle.flatten(c["update"].values())) for c in told]
            assert min(norms) > used["clip"]
        update = oracle.sum_updates(told, names, used["clip"])
        noise = oracle.noise_of(7, number, 801, update.size) * used["noise"] * used["clip"]
        expected = (update + noise) / 2.5
        if running:
            expected, layers = oracle.private_means(
                told, names, running, used, number, pooled=pooled
            )
        after = server_round(task, state, replies)
        got = oracle.flatten(after.weights[n] - state.weights[n] for n in names)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
        for path, (r, v) in running.items():
            share = 1 - (1 - BETA) ** 3 if pooled else 1.0
            mean, var = (
                old + share * (new - old) for old, new in zip((r, v), layers[path], strict=True)
            )
            np.testing.assert_allclose(after.running[path].mean, mean, rtol=0, atol=1e-12)
            np.testing.assert_allclose(after.running[path].var, var, rtol=1e-12, atol=1e-12)
            assert after.running[path].num_batches == 3 * number
        state = after


def test_without_clipping_and_noise_pooled_means_are_those_of_equal_clients():
    """Means are exact; the variance is a geometric mean over clients, so at most the pooled one."""
    task = make_task(
        "fbn", noise=0.0, noise_statistics=0.0, clip=1e9, clip_statistics=1e9, clients=3
    )
    replies = train(task, ToyClients(), task.initial_state)
    plain = replace(task, privacy=None)
    private_one, exact = (server_round(t, t.initial_state, replies) for t in (task, plain))
    for path, running in exact.running.items():
        torch.testing.assert_close(private_one.running[path].mean, running.mean)
        assert (private_one.running[path].var <= running.var + 1e-6).all()
    for name, weight in exact.weights.items():
        torch.testing.assert_close(private_one.weights[name], weight)


def test_variance_between_clients_is_kept():
    """Clients that are constants 0 and 2 have the variance 1 together, though each has none."""
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    task = make_task(
        "fbn", model=model.double(), clients=2, noise=0, noise_statistics=0, clip_statistics=99
    )
    state = replace(
        task.initial_state,
        running={"0": replace(task.initial_state.running["0"], mean=torch.ones(1).double())},
    )
    update = {name: torch.zeros_like(t) for name, t in state.weights.items()}
    both = [
        Reply(i, 1, update, {}, {"0": LayerStats(Moments(4.0, mean, torch.zeros_like(mean)), 1)})
        for i, mean in enumerate((torch.zeros(1).double(), 2 * torch.ones(1).double()))
    ]
    after = server_round(task, state, both).running["0"]
    assert after.mean.item() == pytest.approx(1.0)
    assert after.var.item() == pytest.approx(1.0)


HOSTILE = st.lists(
    st.sampled_from([0.0, 1e-30, 0.3, -1.0, 7.5, -1e3, 1e12, -3e30, 1e38, 1e154, 1.7e308]),
    min_size=4,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(HOSTILE, HOSTILE, HOSTILE), min_size=1, max_size=5),
    gone=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_removing_a_client_changes_the_sums_by_at_most_the_clips(values, gone, dtype):
    """Whatever clients send, also numbers whose squares are infinite in their format."""
    task, state, expected = tiny_task(dtype)
    replies = [hostile_reply(i, state, dtype, *own) for i, own in enumerate(values)]
    left = [reply for reply in replies if reply.client != gone % len(replies)]
    for pools in (True, False):
        (u1, s1), (u0, s0) = (
            clipped_sums(task.privacy, state, some, expected, pools=pools)
            for some in (replies, left)
        )
        assert np.linalg.norm(u1 - u0) <= 0.3 * (1 + 1e-9)
        assert np.linalg.norm(s1 - s0) <= 0.7 * (1 + 1e-9)


@pytest.mark.parametrize("pools", [True, False])
def test_statistics_that_overflow_are_within_the_bound(pools):
    """A variance and a squared mean that are finite, and whose sum is not."""
    task, state, expected = tiny_task(torch.float64)
    large = torch.finfo(torch.float64).max
    bad = hostile_reply(0, state, torch.float64, [1.0] * 4, [large**0.5 / 4] * 4, [large] * 4)
    good = hostile_reply(1, state, torch.float64, [1.0] * 4, [0.1] * 4, [1.0] * 4)
    _, both = clipped_sums(task.privacy, state, [bad, good], expected, pools=pools)
    _, one = clipped_sums(task.privacy, state, [good], expected, pools=pools)
    assert np.linalg.norm(both - one) <= 0.7 * (1 + 1e-9)
    assert server_round(task, state, [bad, good]).round == 1


def tiny_task(dtype):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)).to(dtype)
    task = make_task("fbn", model=model)
    return task, task.initial_state, reply_schema(task, task.initial_state)


def hostile_reply(client, state, dtype, weights, means, variances):
    update = {
        name: torch.tensor(weights, dtype=dtype)[: t.numel()].view(t.shape)
        for name, t in state.weights.items()
    }
    mean = torch.tensor(means[:2], dtype=dtype)
    var = torch.tensor(variances[:2], dtype=dtype).abs()
    report = LayerStats(Moments(3.0, mean, var), 1, samples=2**50)
    return Reply(client, 2**50, update, {}, {"0": report})


def clipped_sums(privacy, state, replies, expected, *, pools):
    """The two sums before noise, read off the release: the same noise comes each time."""
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        plain = private.sum_clipped_vectors

        def watch(vectors, bound):
            total = plain(vectors, bound)
            seen.append(0.0 if total is None else total.numpy())
            return total

        patch.setattr(private, "sum_clipped_vectors", watch)
        release_mean(privacy, state, replies, expected, pools=pools)
    return seen


@pytest.mark.parametrize("claim", ["examples", "count", "samples", "num_batches", "loss"])
def test_what_a_client_says_of_itself_changes_nothing(claim):
    task = make_task("fbn")
    replies = train(task, ToyClients(), task.initial_state)
    honest = server_round(task, task.initial_state, replies)

    def claim_more(report):
        more = {"samples": 1e6} if claim == "samples" else {}
        more |= {"num_batches": 500} if claim == "num_batches" else {}
        count = 1e9 if claim == "count" else report.moments.count
        return replace(report, moments=replace(report.moments, count=count), **more)

    stats = {path: claim_more(report) for path, report in replies[1].stats.items()}
    own = {"examples": 10**6} if claim == "examples" else {}
    own |= {"loss": 1e9, "metrics": {"accuracy": 1.0}} if claim == "loss" else {}
    after = server_round(
        task, task.initial_state, [replies[0], replace(replies[1], stats=stats, **own), replies[2]]
    )
    assert_same(after, honest)


def assert_same(one, other):
    assert (one.round, one.rejected) == (other.round, other.rejected)
    for name, weight in other.weights.items():
        assert torch.equal(one.weights[name], weight)
    for path, running in other.running.items():
        assert torch.equal(one.running[path].mean, running.mean)
        assert torch.equal(one.running[path].var, running.var)
        assert one.running[path].num_batches == running.num_batches


def test_a_faulty_reply_is_one_that_changes_nothing_and_is_not_told():
    task = make_task("fbn")
    replies = train(task, ToyClients(), task.initial_state)
    faulty = replace(replies[1], loss=float("nan"))
    after = server_round(task, task.initial_state, [replies[0], faulty, replies[2]])
    assert after.rejected == ()
    assert_same(after, server_round(task, task.initial_state, [replies[0], replies[2]]))
    nothing = server_round(task, task.initial_state, [])
    assert nothing.round == 1
    assert_same(nothing, server_round(task, task.initial_state, [faulty]))


def test_a_layer_that_a_client_did_not_use_stays_as_it_is():
    """A report of no value counts as none at all, whatever its moments are."""
    task = make_task("fbn")
    replies = train(task, ToyClients(), task.initial_state)
    path = next(iter(replies[1].stats))
    without = {p: report for p, report in replies[1].stats.items() if p != path}
    empty = replace(
        replies[1].stats[path], moments=replace(replies[1].stats[path].moments, count=0.0)
    )
    one, other = (
        server_round(
            task, task.initial_state, [replies[0], replace(replies[1], stats=stats), replies[2]]
        )
        for stats in (without, {**replies[1].stats, path: empty})
    )
    assert_same(one, other)
    used = server_round(task, task.initial_state, replies)
    assert not torch.equal(used.running[path].mean, one.running[path].mean)


def test_one_outlier_does_not_change_who_else_counts():
    """The guard against outliers, which compares clients, is off: clipping bounds each of them."""
    task = make_task("fbn", noise=0.0, noise_statistics=0.0, clip=1e-3)
    replies = train(task, ToyClients(), task.initial_state)
    far = {name: t * 1e12 for name, t in replies[1].update.items()}
    outlier = replace(replies[1], update=far)
    after = server_round(task, task.initial_state, [replies[0], outlier, replies[2]])
    # Its direction counts, not its length; the length of rounding is all that differs.
    honest = server_round(task, task.initial_state, replies)
    for name, weight in honest.weights.items():
        torch.testing.assert_close(after.weights[name], weight, rtol=0, atol=1e-12)


def test_noise_has_the_stated_size_and_differs_by_round_and_seed():
    """Without clients the state is noise alone: its moments, and a chi-square test of its norm."""
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.BatchNorm1d(200)).double()
    task = make_task("naive", model=model)
    first = server_round(task, task.initial_state, [])
    second = server_round(task, first, [])
    start = task.initial_state.weights["0.weight"]
    one = (first.weights["0.weight"] - start).numpy().ravel() * 2.5 / (0.5 * 0.3)
    two = (second.weights["0.weight"] - first.weights["0.weight"]).numpy().ravel() * 2.5 / 0.15
    n = one.size
    for draws in (one, two):
        assert abs(draws.mean()) < 4 / np.sqrt(n)
        assert abs((draws**2).sum() - n) < 4 * np.sqrt(2 * n)
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / np.sqrt(n)
    shift = first.running["1"].mean.numpy() / np.sqrt(1 + 1e-5) * 2.5 / (0.8 * 0.7)
    ratio = np.log((first.running["1"].var.numpy() + 1e-5) / (1 + 1e-5)) * 2.5 / (0.8 * 0.7)
    told = np.concatenate([shift, ratio])
    assert abs((told**2).sum() - told.size) < 4 * np.sqrt(2 * told.size)
    other = replace(task, privacy=replace(task.privacy, seed=8))
    assert not torch.equal(server_round(other, task.initial_state, []).weights["0.weight"],
                           first.weights["0.weight"])  # fmt: skip


@pytest.mark.slow
def test_an_optimal_attacker_is_as_good_as_the_guarantee_says():
    """Guess from what is released whether a client was there; 1500 seeds of one round.

    The best test of a Gaussian mechanism with multiplier σ has the power Φ(1/σ - z) at the level
    Φ(-z). Its measured power must be that: more would break the guarantee, and less would mean that
    the client's contribution is smaller than the bound, so that the test shows nothing.
    """
    task, state, expected = tiny_task(torch.float64)
    reply = hostile_reply(0, state, torch.float64, [9.0] * 4, [50.0] * 4, [1e4] * 4)
    sums = clipped_sums(task.privacy, state, [reply], expected, pools=False)
    exact = [vector / 2.5 for vector in sums]
    scales = (0.5 * 0.3 / 2.5, 0.8 * 0.7 / 2.5)

    def score(replies, seed):
        used = replace(task.privacy, seed=seed)
        released = release_mean(used, state, replies, expected, pools=False)
        parts = (
            private._flatten(released.update, expected.update).numpy(),
            private._measure_layers(released, expected, pools=False).numpy(),
        )
        return sum(
            part @ own / scale**2 for part, own, scale in zip(parts, exact, scales, strict=True)
        )

    worlds = 1500
    without = np.array([score([], seed) for seed in range(worlds)])
    there = np.array([score([reply], worlds + seed) for seed in range(worlds)])
    lengths = [np.linalg.norm(own) / scale for own, scale in zip(exact, scales, strict=True)]
    sigma = 1 / np.hypot(*lengths)
    assert sigma == pytest.approx(task.privacy.find_multiplier(statistics=True), rel=1e-6)
    level, normal = 0.1, NormalDist()
    power = (there > np.quantile(without, 1 - level)).mean()
    assert power == pytest.approx(normal.cdf(1 / sigma - normal.inv_cdf(1 - level)), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "noise_statistics", "rate", "rounds"),
    [(1.0, 2.0, 0.1, 50), (0.7, None, 1.0, 5), (4.0, 4.0, 0.01, 1000)],
)
def test_epsilon_is_that_of_the_accountant_called_by_hand(noise, noise_statistics, rate, rounds):
    used = Privacy(1.0, noise, 10, noise_statistics=noise_statistics, rate=rate, delta=1e-4)
    for statistics in (True, False):
        both = 1 / noise**2 + 1 / (noise_statistics or noise) ** 2
        sigma = both**-0.5 if statistics else noise
        accountant = RDPAccountant()
        for _ in range(rounds):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)
        # Both are bounds: each is the best of other orders of Rényi divergences.
        orders = [*(1 + x / 20 for x in range(1, 80)), *range(5, 300)]
        by_hand = accountant.get_epsilon(1e-4, alphas=orders)
        found = used.find_epsilon(rounds, statistics=statistics)
        assert found == pytest.approx(by_hand, rel=2e-3)
    assert used.find_epsilon(0, statistics=True) == 0


def test_two_releases_cost_what_two_mechanisms_cost_at_full_participation():
    """With all clients in every round, the joint multiplier is composition of two mechanisms."""
    used = Privacy(1.0, 2.0, 10, noise_statistics=3.0, delta=1e-5)
    accountant = RDPAccountant()
    accountant.history = [(2.0, 1.0, 20), (3.0, 1.0, 20)]
    orders = used._list_orders(1.0)
    assert used.find_epsilon(20, statistics=True) == pytest.approx(
        accountant.get_epsilon(1e-5, alphas=orders), rel=1e-9
    )


def test_more_noise_never_costs_more_where_all_clients_take_part():
    found = [
        Privacy(1.0, noise, 10).find_epsilon(5000, statistics=False) for noise in (9.99, 10, 10.01)
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("noise", [0.01, 0.3, 50.0, 1e6])
def test_epsilon_is_a_number_wherever_noise_is(noise, rate):
    assert Privacy(1.0, noise, 10, rate=rate, delta=0.04).find_epsilon(10, statistics=True) >= 0
    found = Privacy(1.0, noise, 10, rate=rate).find_epsilon(10, statistics=True)
    assert found is None or found >= 0
    if noise >= 0.3:
        assert found is not None


@pytest.mark.parametrize("fields", [{"noise": 0.0}, {"noise_statistics": 0.0}])
def test_without_noise_there_is_no_guarantee(fields):
    assert Privacy(**{**SETTINGS, **fields}).find_epsilon(1, statistics=True) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"clip": 0.0}, "clip must be positive, not 0.0"),
        ({"clip_statistics": float("inf")}, "clip_statistics must be positive"),
        ({"clients": -1}, "clients must be positive"),
        ({"noise": -1.0}, "noise must be 0 or more"),
        ({"noise_statistics": float("nan")}, "statistics_multiplier must be 0 or more"),
        ({"rate": 0.0}, r"rate is in \(0, 1\]"),
        ({"delta": 1.0}, r"delta in \(0, 1\)"),
    ],
)
def test_impossible_numbers_are_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Privacy(**{**SETTINGS, **fields})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedtan", "FedTAN exchanges statistics of batches within a round"),
        ("hbn", "HBN measures clients' data"),
        ("heterofl", "HeteroFL measures clients' data for every test"),
        ("alignbn", "AlignBN measures clients' data for every test"),
        ("feddna", "FedDNA weighs clients by their statistics"),
        ("dualbn", "DualBN shares means without a variance as their unit"),
    ],
)
def test_strategies_that_send_more_are_refused_by_name(name, reason):
    with pytest.raises(ValueError, match=f"privacy cannot be kept: {reason}"):
        make_task(name)
    with pytest.raises(ValueError, match="privacy cannot be kept: FedFN"):
        make_task(create_strategy("fedfn", base=name))


def test_momentum_buffers_and_robust_rules_are_refused():
    sending = create_algorithm("fedavg", lr=0.1, momentum=0.9, momentum_state="global")
    with pytest.raises(
        ValueError, match="clients send more than an update; choose 'fedavg' with momentum_state"
    ):
        make_task("gn", sending)
    with pytest.raises(ValueError, match="robust rules depend on every client"):
        make_task("gn", rules=(create_aggregator("median", 1),))
    with pytest.raises(ValueError, match="a secure sum cannot be clipped client by client"):
        Task.build(
            nested_model(),
            create_strategy("gn"),
            create_algorithm("dsgd", lr=0.1),
            privacy=Privacy(**SETTINGS),
            secure=True,
        )
    model = nested_model()
    model.register_buffer("seen", torch.zeros(1).double())
    with pytest.raises(ValueError, match="clients send the buffer 'seen' of the model"):
        make_task("gn", model=model)


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_personal_layers_stay_where_they_are(name):
    """They are no part of a reply, so there is nothing to clip and nothing to pay for."""
    task = make_task(name)
    replies = train(task, ToyClients(), task.initial_state)
    assert all(not reply.stats for reply in replies)
    assert server_round(task, task.initial_state, replies).round == 1


def test_a_state_that_is_not_finite_ends_the_run_by_name():
    task = make_task("gn", noise=1e300, clip=1e300)
    with pytest.raises(NoUsableReplyError, match="would not be finite at the server"):
        server_round(task, task.initial_state, [])


def test_a_missing_accountant_is_a_sentence(monkeypatch):
    monkeypatch.setattr(private.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r'not installed; .* pip install "\.\[privacy\]"'):
        Privacy(**SETTINGS).find_epsilon(1, statistics=True)
