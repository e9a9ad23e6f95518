"""Private rounds against a numpy script written from their description in `docs/privacy.md`.

The script takes the clients' arrays and the noise as they are. A round of no client is nothing but
noise, so the noise of a seed and a round is read off one, with a clip, a noise multiplier and an
expected number of clients that are not those of the round under test.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import stats
from torch import nn

import fednorm
from fednorm.core.messages import LayerStats, RunningStats
from support import ToyClients, nested_model

ADDED = 1e-5  # to variances
MOMENTUM = 0.1
EXAMPLES = (3, 50, 1000, 7)  # of each client
SETTINGS = ("clip", "clip_statistics", "noise", "noise_statistics")
SIZES = (0.1, 1.0, 0.3, 0.03)  # of the numbers that each sends


def shorten(vector, limit):
    length = np.sqrt(np.sum(vector**2))
    return vector * (limit / length) if length > limit else vector


def release(vectors, clip, noise, draws, clients):
    """Return the noisy sum of clipped vectors, divided by the expected number of clients."""
    return sum((shorten(v, clip) for v in vectors), noise * clip * draws) / clients


def describe(moments, running, *, pools):
    """Return a client's statistics of all layers in units of the shared ones, as one vector."""
    parts = []
    for path, (r, v) in running.items():
        mean, var = moments[path]
        spread = var + (mean - r) ** 2 if pools else var
        parts += [(mean - r) / np.sqrt(v + ADDED), np.log((spread + ADDED) / (v + ADDED))]
    return np.concatenate(parts)


def split(vector, like):
    """Iterate over the parts of a vector, in the shapes of the arrays in `like`."""
    parts = np.split(vector, np.cumsum([one.size for one in like])[:-1])
    return (part.reshape(one.shape) for part, one in zip(parts, like, strict=True))


def merge_by_hand(privacy, before, clients, noise, *, pools):
    """Return weights and statistics after a round of clients' (updates, moments by layer)."""
    weights, running = before
    updates = [np.concatenate([update[name].ravel() for name in weights]) for update, _ in clients]
    change = release(updates, privacy.clip, privacy.noise, noise[0], privacy.clients)
    parts = split(change, list(weights.values()))
    moved = {name: w + next(parts) for name, w in weights.items()}

    vectors = [describe(moments, running, pools=pools) for _, moments in clients]
    multiplier = privacy.noise if privacy.noise_statistics is None else privacy.noise_statistics
    mean = release(vectors, privacy.clip_statistics, multiplier, noise[1], privacy.clients)
    parts = split(mean, [array for pair in running.values() for array in pair])
    rate = 1 - (1 - MOMENTUM) ** privacy.batches if pools else 1.0
    after = {}
    for path, (r, v) in running.items():
        shift = next(parts) * np.sqrt(v + ADDED)
        var = np.exp(next(parts)) * (v + ADDED) - ADDED - (shift**2 if pools else 0.0)
        after[path] = (r + rate * shift, (1 - rate) * v + rate * np.maximum(var, 0.0))
    return moved, after


def account_by_hand(noises, rate, rounds, delta):
    """Return ε of rounds whose sums have these noise multipliers: they are one vector each."""
    accountant = RDPAccountant()
    for _ in range(rounds):
        length = np.sqrt(sum(noise**-2 for noise in noises))  # of a client's part, noise being 1
        accountant.step(noise_multiplier=1 / length, sample_rate=rate)
    return accountant.get_epsilon(delta)


def count_long(privacy, before, clients, *, pools):
    """Return how many updates and how many clients' statistics are clipped."""
    updates = [np.concatenate([u.ravel() for u in update.values()]) for update, _ in clients]
    vectors = [describe(moments, before[1], pools=pools) for _, moments in clients]
    limits = ((updates, privacy.clip), (vectors, privacy.clip_statistics))
    return tuple(sum(np.linalg.norm(v) > limit for v in several) for several, limit in limits)


def make_task(strategy, model=None, **settings):
    algorithm = fednorm.create_algorithm("fedavg", lr=0.05)
    private = fednorm.Privacy(**{"clip": 1.0, "noise": 1.0, "clients": 10, **settings})
    chosen = fednorm.create_strategy(strategy)
    return fednorm.Task.build(model or small_model(), chosen, algorithm, privacy=private)


def small_model():
    layers = [nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 5), nn.BatchNorm1d(5)]
    return nn.Sequential(*layers, nn.Linear(5, 3)).double()


def to_arrays(state):
    running = {path: (r.mean.numpy(), r.var.numpy()) for path, r in state.running.items()}
    return {name: w.numpy() for name, w in state.weights.items()}, running


def read_reply(reply):
    moments = {path: report.moments for path, report in reply.stats.items()}
    update = {name: u.numpy() for name, u in reply.update.items()}
    return update, {path: (m.mean.numpy(), m.var.numpy()) for path, m in moments.items()}


def read_noise(state, seed, model=None):
    """Return the noise of a seed in the round after `state`, with a standard deviation of 1."""
    task = make_task("naive", model, seed=seed, clip=2.0, clip_statistics=3.0, noise=0.5)
    (weights, running), after = to_arrays(state), to_arrays(fednorm.server_round(task, state, []))
    update = np.concatenate([(after[0][name] - w).ravel() for name, w in weights.items()])
    return update * 10 / (0.5 * 2.0), describe(after[1], running, pools=False) * 10 / (0.5 * 3.0)


def assert_matches(state, expected):
    weights, running = to_arrays(state)
    assert (set(weights), set(running)) == tuple(map(set, expected))
    for name, value in expected[0].items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-10)
    for path, mean_and_var in expected[1].items():
        np.testing.assert_allclose(running[path], mean_and_var, rtol=1e-10)


def start(task, round_=2):
    """Return a state whose statistics are not 0 and 1."""
    rng = np.random.default_rng(5)
    sizes = {path: len(r.mean) for path, r in task.initial_state.running.items()}
    drawn = {path: (rng.normal(size=n), rng.uniform(0.1, 4.0, n)) for path, n in sizes.items()}
    running = {p: RunningStats(*map(torch.from_numpy, pair), 5) for p, pair in drawn.items()}
    return replace(task.initial_state, running=running, round=round_)


def make_reply(state, client):
    rng, size = np.random.default_rng([7, client]), SIZES[client]
    moments = {
        path: fednorm.Moments(
            3.0 * EXAMPLES[client],
            r.mean + size * torch.from_numpy(rng.normal(size=len(r.mean))),
            r.var * torch.from_numpy(np.exp(size * rng.normal(size=len(r.mean)))),
        )
        for path, r in state.running.items()
    }
    draws = {name: rng.normal(size=tuple(w.shape)) for name, w in state.weights.items()}
    return fednorm.Reply(
        client=client,
        examples=EXAMPLES[client],
        update={name: size * torch.from_numpy(draw) for name, draw in draws.items()},
        buffers={},
        stats={p: LayerStats(m, 9, float(EXAMPLES[client])) for p, m in moments.items()},
    )


@pytest.mark.parametrize("strategy", ["fbn", "naive"])
@pytest.mark.parametrize("present", [(), (1,), (0, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("clips", "clipped"), [((12.0, 12.0), (0, 0)), ((2.0, 1.0), (2, 2)), ((0.1, 12.0), (4, 0))]
)
@pytest.mark.parametrize("noises", [(0.0, None), (1.3, None), (0.7, 0.3)])
def test_a_round_is_that_of_the_script(strategy, present, clips, clipped, noises):
    settings = dict(zip(SETTINGS, (*clips, *noises), strict=True))
    task = make_task(strategy, clients=3.4, batches=3, seed=11, **settings)
    state, pools = start(task), strategy == "fbn"
    before, noise = to_arrays(state), read_noise(state, seed=11)
    sent = [read_reply(make_reply(state, client)) for client in range(4)]
    assert count_long(task.privacy, before, sent, pools=pools) == clipped
    after = fednorm.server_round(task, state, [make_reply(state, client) for client in present])
    clients = [sent[client] for client in present]
    assert_matches(after, merge_by_hand(task.privacy, before, clients, noise, pools=pools))
    assert {r.num_batches for r in after.running.values()} == {5 + 3}


@pytest.mark.parametrize(("strategy", "clips"), [("fbn", (0.05, 14.0)), ("naive", (0.1, 1.0))])
def test_an_own_loop_with_sampled_clients_is_that_of_the_script(strategy, clips):
    """Trained clients of unequal size, and a network with layers in blocks."""
    settings = dict(zip(SETTINGS, (*clips, 0.5, 0.02), strict=True))
    task = make_task(strategy, nested_model(), clients=2.5, batches=2, seed=3, **settings)
    data = ToyClients(sizes=(2, 9, 4, 5, 3), steps=2)
    state, pools, long = task.initial_state, strategy == "fbn", []
    expected = to_arrays(state)
    for present in ((0, 1, 4), (), (2, 3), (1,)):
        received, new = fednorm.broadcast(task, state), fednorm.ClientState()
        batches = [data.batches(client, received.round) for client in present]
        replies = [fednorm.client_round(task, received, new, own)[0] for own in batches]
        sent = [read_reply(reply) for reply in replies]
        noise = read_noise(state, seed=3, model=nested_model())
        long.append(count_long(task.privacy, expected, sent, pools=pools))
        expected = merge_by_hand(task.privacy, expected, sent, noise, pools=pools)
        state = fednorm.server_round(task, state, replies)
        assert_matches(state, expected)
    assert all(0 < n < 6 for n in np.sum(long, axis=0)), long


def test_a_faulty_reply_counts_as_one_of_zeros():
    task = make_task("fbn", clip=2.0, seed=1)
    state = start(task)
    good, other = make_reply(state, 0), make_reply(state, 1)
    faulty = replace(other, update={name: u * np.nan for name, u in other.update.items()})
    after = fednorm.server_round(task, state, [good, faulty])
    clients, noise = [read_reply(good)], read_noise(state, seed=1)
    assert_matches(after, merge_by_hand(task.privacy, to_arrays(state), clients, noise, pools=True))
    assert not after.rejected


def test_noise_is_normal_and_new_in_every_round_and_for_every_seed():
    model = nn.Sequential(nn.Linear(20, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 2)).double()
    task = make_task("naive", model)
    places = ((0, 0), (1, 0), (0, 1))
    drawn = [z for at, seed in places for z in read_noise(start(task, at), seed, model)]
    for draws in drawn:
        assert stats.kstest(draws, "norm").pvalue > 0.001
    shortest = min(map(len, drawn))
    correlated = np.corrcoef([draws[:shortest] for draws in drawn]) - np.eye(len(drawn))
    assert np.abs(correlated).max() < 5 / np.sqrt(shortest)


def test_the_simulator_divides_by_the_expected_number_of_clients(tmp_path):
    """Of clients that learn nothing the weights become noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    settings = {"rounds": 1, "clients": 20, "participation": 0.3}
    settings["privacy"] = {"clip": 0.5, "noise": 2.0, "delta": 1e-3}
    settings["algorithm"] = {"name": "fedavg", "lr": 1e-12}
    run = fednorm.simulate("none", model=model, out=tmp_path, **settings)
    trained = fednorm.load(tmp_path, model)
    end = nn.utils.parameters_to_vector(trained.parameters()).detach().numpy()
    assert stats.kstest((end - before) / (2.0 * 0.5 / (0.3 * 20)), "norm").pvalue > 0.001
    assert run.epsilon == pytest.approx(account_by_hand([2.0], 0.3, 1, 1e-3), rel=1e-10)


@pytest.mark.parametrize(
    ("noise", "statistics", "rate", "rounds", "delta"),
    [(1.5, None, 0.1, 100, 1e-5), (3.0, 4.0, 0.3, 80, 7e-4), (2.0, 1.0, 1.0, 10, 1e-3)],
)
def test_epsilon_is_that_of_the_accountant(noise, statistics, rate, rounds, delta):
    public = {"clip": 0.3, "clients": 9, "rate": rate, "delta": delta}
    private = fednorm.Privacy(noise=noise, noise_statistics=statistics, **public)
    for noises in ([noise], [noise, statistics or noise]):
        found = private.find_epsilon(rounds, statistics=len(noises) == 2)
        assert found == pytest.approx(account_by_hand(noises, rate, rounds, delta), rel=1e-10)
