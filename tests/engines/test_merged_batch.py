"""Merged batches equal the loop within rounding, for every strategy that can be merged."""

import pytest
import torch
from torch import nn

from fednorm import create_strategy
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.task import Task
from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.engines import merged_batch
from fednorm.errors import NonFiniteLossError
from fednorm.models import create_model
from fednorm.strategies import STRATEGIES
from support import ToyClients, last, nested_model, task_of, why_not

STEP = create_algorithm("dsgd", lr=0.05, momentum=0.9, weight_decay=1e-3)
MERGEABLE = sorted(name for name in STRATEGIES if create_strategy(name).mergeable_batches)


def together(task, clients, count=8):
    *_, result = merged_batch.rounds(task, clients, count)
    return result


def assert_equal(one, two):
    for name, value in one.state.weights.items():
        torch.testing.assert_close(two.state.weights[name], value, rtol=0, atol=1e-11)
    for path, running in one.state.running.items():
        torch.testing.assert_close(two.state.running[path].mean, running.mean, rtol=0, atol=1e-11)
        torch.testing.assert_close(two.state.running[path].var, running.var, rtol=0, atol=1e-11)
        assert two.state.running[path].num_batches == running.num_batches
    assert two.exchanges == one.exchanges
    assert two.bytes_up == one.bytes_up
    assert two.bytes_down == one.bytes_down


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGEABLE)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 7, 3), (5,)])
def test_equals_the_loop(name, sizes):
    clients = ToyClients(sizes=sizes)
    loop = last(task_of(name, STEP, count=8), clients, 8)
    merged = together(task_of(name, STEP, count=8), clients)
    assert_equal(loop, merged)
    if len(set(sizes)) == 1:
        assert merged.train_loss == pytest.approx(loop.train_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fixbn", "fbn", "fedtan"])
@pytest.mark.parametrize("statistics", ["average", "pool"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_equals_the_loop_with_every_switch(name, statistics, momentum):
    fields = {"statistics": statistics, "stats_momentum": momentum, "count": 8}
    clients = ToyClients(sizes=(3, 5))
    if (name, statistics) in {("fbn", "average"), ("fedtan", "average")}:
        assert why_not("merged", task_of(name, STEP, **fields), _digits(), ours=True)
        return
    assert why_not("merged", task_of(name, STEP, **fields), _digits(), ours=True) is None
    assert_equal(
        last(task_of(name, STEP, **fields), clients, 8),
        together(task_of(name, STEP, **fields), clients),
    )


def test_partial_participation_without_momentum():
    clients = ToyClients(absent={2: (1,), 5: (0, 2)})
    step = create_algorithm("dsgd", lr=0.05)
    for name in ("naive", "fbn"):
        assert_equal(last(task_of(name, step), clients, 8), together(task_of(name, step), clients))


def test_layers_without_affine_or_statistics():
    for fields in ({"affine": False}, {"track_running_stats": False}):
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6, **fields), nn.Linear(6, 4)]
        model = nn.Sequential(*layers).double()
        for sizes in ((4, 4), (3, 6)):
            clients = ToyClients(sizes=sizes)
            loop = last(task_of("naive", STEP, model=model), clients, 4)
            assert_equal(loop, together(task_of("naive", STEP, model=model), clients, 4))


class Rows(nn.Module):
    """Folds the rows of an image into the batch before it normalises."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        self.double()

    def forward(self, x):
        rows = self.norm(self.inner(x.reshape(len(x) * 8, 8))).relu()
        return self.last(rows).view(len(x), 8, -1).mean(1)


def test_a_model_that_folds_an_axis_into_the_batch():
    clients = ToyClients(sizes=(4, 4, 4))
    for name in ("naive", "fbn"):
        loop = last(task_of(name, STEP, model=Rows()), clients, 4)
        assert_equal(loop, together(task_of(name, STEP, model=Rows()), clients, 4))


def _digits(participation=1.0):
    plan = Plan(20)
    data = load_dataset("digits", 0)
    return build_federation(data, "iid", plan, clients=4, seed=0, participation=participation)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(MERGEABLE)))
def test_other_strategies_are_left_to_the_loop(name):
    assert why_not("merged", task_of(name, STEP), _digits(), ours=True)


def test_fits_only_where_it_is_exact():
    model = nested_model()
    assert why_not("merged", task_of("naive", STEP), _digits(), ours=True) is None
    assert why_not("merged", task_of("naive", create_algorithm("fedavg")), _digits(), ours=True)
    assert why_not("merged", task_of("fedbn", STEP), _digits(), ours=True)
    assert why_not("merged", task_of("silobn", STEP), _digits(), ours=True)
    assert why_not("merged", task_of("naive", STEP), _digits(participation=0.5), ours=True)
    assert (
        why_not(
            "merged",
            task_of("naive", create_algorithm("dsgd")),
            _digits(participation=0.5),
            ours=True,
        )
        is None
    )
    robust = Task.build(
        model, create_strategy("fbn"), STEP, aggregator=create_aggregator("median", f=0)
    )
    assert why_not("merged", robust, _digits(), ours=True)
    dropping = create_model("fbn_cnn", (1, 8, 8), 10, 0)
    assert why_not("merged", task_of("naive", STEP, model=dropping), _digits(), ours=True)
    model.register_buffer("level", torch.zeros(()))
    assert why_not("merged", task_of("naive", STEP, model=model), _digits(), ours=True)


def test_a_loss_that_is_not_finite_names_its_client():
    class Broken(ToyClients):
        def _batch(self, client, generator):
            x, y = super()._batch(client, generator)
            return (x * float("nan") if client == 1 else x), y

    with pytest.raises(NonFiniteLossError, match="round 1 at client 1"):
        together(task_of("fbn", STEP), Broken())


def test_a_model_that_mixes_the_samples_of_clients_is_refused():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(64, 4)

        def forward(self, x):
            half = self.norm(x.view(-1, 2, 1, 8, 8).mean(1))
            return self.last(half.flatten(1)).repeat_interleave(2, 0)

    task = task_of("naive", create_algorithm("dsgd", lr=0.05), model=Halved().double())
    with pytest.raises(RuntimeError, match="shape"):
        together(task, ToyClients(sizes=(2, 2, 2)), 1)


def test_it_reports_the_training_loss_of_the_loop():
    clients = ToyClients(sizes=(2, 7, 3))
    loop = last(task_of("fbn", STEP), clients, 1)
    *_, locked = merged_batch.rounds(task_of("fbn", STEP), clients, 1)
    assert locked.train_loss == pytest.approx(loop.train_loss)
