"""Statistics are those of the population over which weights are averaged.

Under fedavg a client weighs its number of samples, however large its batches are and however many
steps it takes; under dsgd it weighs its batch. The oracle is federated learning on plain torch
models, with moments of all values that the layers saw.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.data.dataset import Dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.engines import loop, merged_batch, stacked
from populations import Population, flat, follow, population, weighted
from support import in_processes, last, nested_model, run_by_hand, task_of

LR, BETA, TIGHT = 0.05, 0.1, 1e-11


def norms(model):
    return {
        p: m for p, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }


def train_locally(model, batches, *, frozen):
    """Train a copy by plain SGD; return it, and what each BatchNorm layer saw in each step."""
    local = copy.deepcopy(model).train()
    seen = {path: [] for path in norms(local)}
    for path, layer in norms(local).items():
        layer.train(not frozen)
        layer.register_forward_pre_hook(lambda _m, x, path=path: seen[path].append(x[0].detach()))
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for x, y in batches.steps:
        optimizer.zero_grad()
        functional.cross_entropy(local(x), y).backward()
        optimizer.step()
    return local, seen


def federated(model, clients, rounds, *, frozen, by_batch=False):
    """Plain FedAvg whose running statistics are those of the population, as the paper's are."""
    for round_ in range(1, rounds + 1):
        replies, weights = [], []
        for client in clients.participants(round_):
            batches = clients.batches(client, round_)
            replies.append(train_locally(model, batches, frozen=frozen))
            weights.append(len(batches.steps[0][0]) if by_batch else batches.examples)
        running = {}
        for path, layer in norms(model).items():
            inputs = [seen[path] for _, seen in replies]
            per_example = [x[0][0, 0].numel() for x in inputs]
            total = [w * k for w, k in zip(weights, per_example, strict=True)]
            share = 1 - (1 - BETA) ** len(inputs[0])
            found = population([[flat(x) for x in own] for own in inputs], total, BETA)
            running[path] = follow(layer.running_mean, layer.running_var, found, share)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parts = [
                    w * local.get_parameter(name)
                    for w, (local, _) in zip(weights, replies, strict=True)
                ]
                parameter.copy_(sum(parts) / sum(weights))
        for path, layer in norms(model).items():
            layer.running_mean, layer.running_var = running[path]
    return model


def assert_same(state, model, tolerance=TIGHT):
    for name, value in state.weights.items():
        torch.testing.assert_close(value, model.get_parameter(name), rtol=0, atol=tolerance)
    assert norms(model)
    for path, layer in norms(model).items():
        got = state.running[path]
        torch.testing.assert_close(got.mean, layer.running_mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.var, layer.running_var, rtol=tolerance, atol=tolerance)


# What clients normalise with: the shared statistics, or those of their batches.
METHODS = {
    "fbn": ("fbn", {}, True),
    "naive, pooled": ("naive", {"statistics": "pool"}, False),
    "fixbn, pooled": ("fixbn", {"statistics": "pool", "freeze_round": 1.0}, False),
    "feddna of strength 0": ("feddna", {"strength": 0}, False),
}


def run(method, clients, rounds=3, kind="fedavg", model=None):
    name, fields, frozen = METHODS[method]
    task = task_of(name, create_algorithm(kind, lr=LR), count=rounds, model=model, **fields)
    state = last(task, clients, rounds).state
    plain = copy.deepcopy(model) if model else nested_model()
    return state, federated(plain, clients, rounds, frozen=frozen, by_batch=kind == "dsgd")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_unequal_holdings_and_batches(method):
    """Layers with 64, 16 and fewer values per example, after convolutions of stride 2."""
    assert_same(*run(method, Population(batch=(4, 7, 3))))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_step_of_unequal_batches(method):
    assert_same(*run(method, Population(batch=(4, 7, 3), steps=(1, 1, 1))))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_partial_participation(method):
    """The population of a round are the clients that take part in it."""
    assert_same(*run(method, Population(absent={1: (2,), 2: (0,), 3: (1, 2)})))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_smaller_last_batch(method):
    """Its values weigh as much as those of a full one in the same place."""
    assert_same(*run(method, Population(last=(2, 3, 4))))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_dsgd_weighs_batches(method):
    clients = Population(batch=(4, 7, 3), steps=(1, 1, 1), absent={2: (1,)})
    assert_same(*run(method, clients, kind="dsgd"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_where_a_client_holds_one_batch(method):
    """Here the population is that of the batches."""
    assert_same(*run(method, Population(holds=(4, 7, 3), batch=(4, 7, 3))))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_after_pooling(method):
    """One layer sees 36 values of an example, one 9, one a single one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4),
    ).double()  # fmt: skip
    assert_same(*run(method, Population(), model=model))


@pytest.mark.parametrize("method", METHODS)
def test_clients_with_images_of_other_sizes(method):
    """Each client counts as many values per example as its own examples have."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4),
    ).double()  # fmt: skip
    clients = Population(shapes=((1, 5, 5), (1, 8, 8), (1, 6, 9)))
    assert_same(*run(method, clients, model=model))


FIRST = [
    ("fbn", {}), ("naive", {"statistics": "pool"}), ("fixbn", {"statistics": "pool"}),
    ("feddna", {"strength": 0}), ("dualbn", {}), ("fedtan", {}), ("brn", {"statistics": "pool"}),
    ("switchnorm", {"statistics": "pool"}),
]  # fmt: skip


def first_layer():
    """A layer that sees the data themselves, so that its input does not depend on weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 4)).double()


def found_in(clients, round_=1):
    steps = [[flat(x) for x, _ in clients.batches(c, round_).steps] for c in clients.all()]
    return population(steps, [9 * held for held in clients.holds], BETA)


def once(name, fields, clients):
    task = task_of(name, create_algorithm("fedavg", lr=LR), model=first_layer(), **fields)
    return last(task, clients, 1).state.running["0"]


@pytest.mark.parametrize(("name", "fields"), FIRST)
def test_every_strategy_that_pools(name, fields):
    clients = Population(shapes=((2, 3, 3),) * 3)
    got = once(name, fields, clients)
    n, mean, var = found_in(clients)
    share = 1 - 0.9**3
    torch.testing.assert_close(got.mean, share * mean, rtol=0, atol=TIGHT)
    expected = (1 - share) + share * var * n / (n - 1)
    torch.testing.assert_close(got.var, expected, rtol=0, atol=TIGHT)


@pytest.mark.parametrize(("name", "fields"), FIRST[:-1])
def test_unequal_numbers_of_steps(name, fields):
    """A client that takes more steps weighs no more; all channels move by one share."""
    clients = Population(shapes=((2, 3, 3),) * 3, steps=(7, 1, 3))
    got = once(name, fields, clients)
    n, mean, var = found_in(clients)
    share = float(got.mean @ mean / (mean @ mean))
    assert BETA - TIGHT <= share <= 1 - (1 - BETA) ** 7 + TIGHT
    torch.testing.assert_close(got.mean, share * mean, rtol=0, atol=TIGHT)
    expected = (1 - share) + share * var * n / (n - 1)
    torch.testing.assert_close(got.var, expected, rtol=0, atol=TIGHT)


class Two(Population):
    """960 samples at mean 0 and 40 at mean 10, in batches of 32; the last of the 40 has 8."""

    def __init__(self):
        super().__init__(
            holds=(960, 40), batch=(32, 32), steps=(30, 2), last=(32, 8),
            shapes=((2,), (2,)), again=True,
        )  # fmt: skip

    def _batch(self, client, size, generator):
        x = torch.randn((size, 2), generator=generator, dtype=torch.float64)
        return x + 10 * client, torch.randint(4, (size,), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), FIRST[:-1])
def test_many_rounds_end_at_the_population(name, fields):
    """The limit does not depend on how fast the statistics follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4)).double()
    clients = Two()
    if name == "fixbn":
        fields = {**fields, "freeze_round": 1.0}
    task = task_of(
        name, create_algorithm("fedavg", lr=1e-6), model=model, stats_momentum=0.5, **fields
    )
    got = last(task, clients, 25).state.running["0"]
    steps = [[flat(x) for x, _ in clients.batches(c, 1).steps] for c in (0, 1)]
    n, mean, var = population(steps, [960, 40], 0.5)
    torch.testing.assert_close(got.mean, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.var, var * n / (n - 1), rtol=0, atol=1e-10)
    assert (got.mean - 0.4).abs().max() < 0.4  # of the last few batches, not of all samples
    assert (got.var - 4.84).abs().max() < 1


@pytest.mark.slow
def test_as_users_run_it():
    """Float32, a data set with natural groups, one local epoch in batches of 32, three rounds."""
    generator = torch.Generator().manual_seed(0)
    groups = np.repeat([0, 1], [960, 40])
    x = torch.randn((1000, 3), generator=generator) + 10 * torch.from_numpy(groups)[:, None]
    y = torch.randint(4, (1000,), generator=generator)
    data = Dataset("two", x, y, x[:8], y[:8], 4, groups)
    clients = build_federation(data, "natural", Plan(32, None, 1), clients=2, seed=0)
    assert sorted(map(len, clients.parts)) == [40, 960]
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
    for name in ("fbn", "dualbn", "fedtan"):
        task = task_of(name, create_algorithm("fedavg", lr=LR), model=model, stats_momentum=0.02)
        got = last(task, clients, 60).state.running["0"]
        torch.testing.assert_close(got.mean, x.mean(0), rtol=0, atol=0.05)
        torch.testing.assert_close(got.var, x.var(0), rtol=0.03, atol=0)


FOUR = Population(
    holds=(90, 6, 24, 40),
    batch=(4,) * 4,
    steps=(2,) * 4,
    shapes=((1, 8, 8),) * 4,
    absent={2: (1,)},
)


def run_stacked(task, clients, rounds):
    return loop.rounds(task, clients, rounds, train=stacked.StackedTrainer(task, 3).train)


# Processes take long to start, and know nothing of strategies.
ENGINES = [(loop.rounds, m) for m in METHODS] + [(run_stacked, m) for m in METHODS]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "method"), [*ENGINES, (in_processes, "fbn")])
def test_every_engine(engine, method):
    name, fields, frozen = METHODS[method]
    task = task_of(name, create_algorithm("fedavg", lr=LR), count=3, **fields)
    *_, result = engine(task, FOUR, 3)
    assert_same(result.state, federated(nested_model(), FOUR, 3, frozen=frozen))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_merged_batch(method):
    name, fields, frozen = METHODS[method]
    clients = Population(batch=(4, 7, 3), steps=(1, 1, 1))
    task = task_of(name, create_algorithm("dsgd", lr=LR), count=3, **fields)
    *_, result = merged_batch.rounds(task, clients, 3)
    assert_same(result.state, federated(nested_model(), clients, 3, frozen=frozen, by_batch=True))


def test_the_two_public_functions():
    clients = Population()
    task = task_of("fbn", create_algorithm("fedavg", lr=LR))
    assert_same(run_by_hand(task, clients, 3), federated(nested_model(), clients, 3, frozen=True))


def test_the_server_asks_nothing_but_the_replies():
    """A reply lost on its way leaves the population of the others."""
    clients = Population(batch=(4, 7, 3))
    task = task_of("fbn", create_algorithm("fedavg", lr=LR))
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in (0, 1, 2)
    ]
    state = server_round(task, task.initial_state, [replies[0], replies[2]])
    alone = Population(batch=(4, 7, 3), absent={1: (1,)})
    assert_same(state, federated(nested_model(), alone, 1, frozen=True))


def test_the_oracle_itself():
    """Weighted moments of two clients, by the law of total variance."""
    x, y = torch.tensor([[0.0, 2.0]]).double(), torch.tensor([[10.0, 10.0, 13.0]]).double()
    n, mean, var = population([[x], [y]], [6, 2], BETA)
    assert (n, float(mean), float(var)) == pytest.approx((5, 3.5, 0.75 + 0.5 + 0.1875 * 100))
    assert [float(v) for v in weighted(x, torch.tensor([1.0, 3.0]).double())] == [1.5, 0.75]


@pytest.mark.parametrize("name", ["naive", "fbn", "fedtan", "feddna", "brn", "switchnorm"])
def test_one_client_has_torchs_running_variance(name):
    """Its correction by n/(n-1) asks for the values that were seen, not for the samples held."""
    clients = Population(holds=(500,), batch=(5,), steps=(1,), shapes=((2,),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4)).double()
    fields = {"strength": 0} if name == "feddna" else {"statistics": "pool"}
    task = task_of(name, create_algorithm("fedavg", lr=LR), model=model, **fields)
    got = last(task, clients, 1).state.running["0"]
    plain = nn.BatchNorm1d(2).double()
    plain(clients.batches(0, 1).steps[0][0])
    torch.testing.assert_close(got.mean, plain.running_mean, rtol=0, atol=TIGHT)
    torch.testing.assert_close(got.var, plain.running_var, rtol=0, atol=TIGHT)
