"""A private federation from the text of docs/privacy.md alone, training included, in numpy.

Nothing of fednorm is used but the two functions of a round: not its noise, not its layouts. Noise
is judged by its distribution, ε by formulas of the literature.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from fednorm import Batches, ClientState, Privacy, Task, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.strategies import create_strategy

FEATURES, CLASSES, STEPS, RATE, BETA, EPS = 5, 3, 2, 0.4, 0.1, 1e-5
SIZES = (4, 7, 12)  # samples of a batch of each client
SOME = 0.8  # a bound that clips some of the updates
EXPECTED = 2.0  # clients in a round: by this number, not by three, sums are divided


def draw(client, number):
    """The batches of a client in a round; clients differ in mean and scale."""
    rng = np.random.default_rng([client, number])
    spread = 1 + client
    x = rng.normal(client - 1, spread, size=(STEPS, SIZES[client], FEATURES))
    return x, rng.integers(CLASSES, size=(STEPS, SIZES[client]))


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()


class Plain:
    """FBN with a normalised input and a linear classifier, one array for each tensor."""

    def __init__(self, clip, clip_statistics):
        linear = make_model()[1]
        self.gamma, self.beta = np.ones(FEATURES), np.zeros(FEATURES)
        self.w, self.b = linear.weight.detach().numpy().copy(), linear.bias.detach().numpy().copy()
        self.r, self.v = np.zeros(FEATURES), np.ones(FEATURES)
        self.clip, self.clip_statistics = clip, clip_statistics
        self.longest = {"update": [], "statistics": []}

    def train(self, x, y):
        """What a client sends: its change of all parameters, its moments in shared units."""
        gamma, beta, w, b = (a.copy() for a in (self.gamma, self.beta, self.w, self.b))
        for batch, labels in zip(x, y, strict=True):
            unit = (batch - self.r) / np.sqrt(self.v + EPS)
            hidden = unit * gamma + beta
            scores = np.exp(hidden @ w.T + b)
            error = scores / scores.sum(1, keepdims=True)
            error[np.arange(len(labels)), labels] -= 1
            error /= len(labels)
            back = error @ w
            steps = ((back * unit).sum(0), back.sum(0), error.T @ hidden, error.sum(0))
            for tensor, gradient in zip((gamma, beta, w, b), steps, strict=True):
                np.subtract(tensor, RATE * gradient, out=tensor)
        change = [gamma - self.gamma, beta - self.beta, w - self.w, b - self.b]
        # The last step weighs β, the one before it β(1-β).
        age = np.array([(1 - BETA) ** (STEPS - 1 - s) for s in range(STEPS)])
        age /= age.sum()
        shift = sum(a * (one - self.r).mean(0) for a, one in zip(age, x, strict=True))
        square = sum(a * ((one - self.r) ** 2).mean(0) for a, one in zip(age, x, strict=True))
        told = np.concatenate(
            [shift / np.sqrt(self.v + EPS), np.log((square + EPS) / (self.v + EPS))]
        )
        return np.concatenate([part.ravel() for part in change]), told

    def shorten(self, vector, bound, kind):
        length = math.sqrt(float(sum(value * value for value in vector)))
        self.longest[kind].append(length)
        return vector if length <= bound else vector * (bound / length)

    def round(self, number):
        update, told = 0.0, 0.0
        for client in range(len(SIZES)):
            change, moments = self.train(*draw(client, number))
            update = update + self.shorten(change, self.clip, "update")
            told = told + self.shorten(moments, self.clip_statistics, "statistics")
        update, told = update / EXPECTED, told / EXPECTED
        cuts = np.cumsum([FEATURES, FEATURES, FEATURES * CLASSES])
        gamma, beta, w, b = np.split(update, cuts)
        self.gamma, self.beta = self.gamma + gamma, self.beta + beta
        self.w, self.b = self.w + w.reshape(self.w.shape), self.b + b
        shift = told[:FEATURES] * np.sqrt(self.v + EPS)
        square = (self.v + EPS) * np.exp(told[FEATURES:]) - EPS
        share = 1 - (1 - BETA) ** STEPS
        variance = np.maximum(square - shift**2, 0)
        self.r, self.v = self.r + share * shift, self.v + share * (variance - self.v)


def make_task(**privacy):
    return Task.build(
        make_model(),
        create_strategy("fbn"),
        create_algorithm("fedavg", lr=RATE),
        rounds=9,
        privacy=Privacy(**{"clients": EXPECTED, "batches": STEPS, **privacy}),
    )


def run_round(task, state, number):
    sent, replies = broadcast(task, state), []
    for client, size in enumerate(SIZES):
        x, y = draw(client, number)
        steps = [(torch.from_numpy(a), torch.from_numpy(c)) for a, c in zip(x, y, strict=True)]
        batches = Batches(client, steps, examples=10 * size)
        replies.append(client_round(task, sent, ClientState(), batches)[0])
    return server_round(task, state, replies)


@pytest.mark.parametrize(("clip", "clip_statistics"), [(0.05, 0.4), (SOME, 2.0), (1e6, 1e6)])
def test_rounds_are_those_of_the_text(clip, clip_statistics):
    plain = Plain(clip, clip_statistics)
    task = make_task(clip=clip, clip_statistics=clip_statistics, noise=0.0)
    state = task.initial_state
    for number in range(1, 5):
        state = run_round(task, state, number)
        plain.round(number)
        expected = {
            "0.weight": plain.gamma, "0.bias": plain.beta, "1.weight": plain.w, "1.bias": plain.b,
        }  # fmt: skip
        assert set(expected) == set(state.weights)
        for name, tensor in expected.items():
            np.testing.assert_allclose(state.weights[name].numpy(), tensor, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.running["0"].mean, plain.r, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.running["0"].var, plain.v, rtol=0, atol=1e-12)
    clipped = {length > clip for length in plain.longest["update"]}
    assert clipped == {0.05: {True}, SOME: {True, False}, 1e6: {False}}[clip]


@pytest.mark.slow
def test_noise_is_gaussian_of_the_stated_size_and_independent():
    """A round of no client is noise; 500 seeds, two rounds each."""
    clip, noise, noise_statistics, clip_statistics = 0.3, 1.5, 2.5, 0.02
    rows = []
    for seed in range(500):
        task = make_task(
            clip=clip,
            noise=noise,
            clip_statistics=clip_statistics,
            noise_statistics=noise_statistics,
            seed=seed,
        )
        state, row = task.initial_state, []
        for _ in range(2):
            after = server_round(task, state, [])
            change = [(after.weights[n] - t).numpy().ravel() for n, t in state.weights.items()]
            row.append(np.concatenate(change) * EXPECTED / (noise * clip))
            share = 1 - (1 - BETA) ** STEPS
            before = state.running["0"]
            shift = (after.running["0"].mean - before.mean) / share / (before.var + EPS).sqrt()
            row.append(shift.numpy() * EXPECTED / (noise_statistics * clip_statistics))
            state = after
        rows.append(np.concatenate(row))
    drawn = np.stack(rows)  # 500 seeds, all coordinates of both rounds
    normal = sorted(drawn.ravel())
    ranks = (np.arange(len(normal)) + 0.5) / len(normal)
    reached = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in normal])
    assert abs(reached - ranks).max() < 1.95 / math.sqrt(len(normal))  # Kolmogorov, p = 0.001
    correlation = np.corrcoef(drawn.T) - np.eye(drawn.shape[1])
    assert abs(correlation).max() < 5.5 / math.sqrt(len(rows))


def find_renyi_epsilon(multiplier, rate, rounds, delta):
    """ε by Rényi divergences of integer orders (Mironov et al., 2019; Balle et al., 2020)."""
    best = math.inf
    for order in itertools.chain(range(2, 64), (80, 128, 256)):
        terms = [
            math.lgamma(order + 1)
            - math.lgamma(k + 1)
            - math.lgamma(order - k + 1)
            + (order - k) * (math.log1p(-rate) if rate < 1 else (0 if k == order else -math.inf))
            + k * math.log(rate)
            + (k * k - k) / (2 * multiplier**2)
            for k in range(order + 1)
        ]
        largest = max(terms)
        total = largest + math.log(sum(math.exp(term - largest) for term in terms))
        spent = rounds * total / (order - 1)
        spent += math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, spent)
    return best


def find_delta(epsilon, distance):
    """δ of Gaussians at that distance, exactly (Balle, Wang, 2018)."""

    def reach(value):
        return 0.5 * math.erfc(-value / math.sqrt(2))

    tail = math.exp(epsilon) * reach(-distance / 2 - epsilon / distance)
    return reach(distance / 2 - epsilon / distance) - tail


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.05])
@pytest.mark.parametrize("rounds", [1, 60])
@pytest.mark.parametrize("statistics", [True, False])
def test_epsilon_is_that_of_the_literature(rate, rounds, statistics):
    private = Privacy(clip=1.0, noise=3.0, noise_statistics=4.0, clients=10, rate=rate, delta=1e-4)
    multiplier = (3.0**-2 + 4.0**-2) ** -0.5 if statistics else 3.0
    got = private.find_epsilon(rounds, statistics=statistics)
    assert got <= find_renyi_epsilon(multiplier, rate, rounds, 1e-4) * (1 + 1e-6)
    assert got >= 0.9 * find_renyi_epsilon(multiplier, rate, rounds, 1e-4)
    if rate == 1:  # never less than the exact curve allows
        assert find_delta(got, math.sqrt(rounds) / multiplier) <= 1e-4
