"""Robust rules at the server: whole updates as vectors, counts, robust FBN."""

import pickle
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednorm import ClientState, Moments, broadcast, client_round, pool, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.aggregation import combine_tensors, weighted_mean
from fednorm.core.messages import LayerStats, RunningStats
from fednorm.core.strategy import MergeInput, average, ema_update, pool_statistics
from fednorm.errors import TooFewClientsError
from support import ToyClients, task_of


def reports(n=7, channels=4, seed=0):
    rng = np.random.default_rng(seed)
    tensors = [
        (
            torch.from_numpy(rng.normal(2, 3, channels)),
            torch.from_numpy(rng.uniform(1, 2, channels)),
        )
        for _ in range(n)
    ]
    return [Moments(float(rng.integers(5, 90)), mean, var) for mean, var in tensors]


def numpy_rule(name, f):
    def trimmed(x):
        return np.sort(x, axis=0)[f : len(x) - f].mean(0)

    return {"median": lambda x: np.median(x, axis=0), "trimmed_mean": trimmed}[name]


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_robust_pooling_is_the_formula(name):
    clients, rule = reports(), numpy_rule(name, 2)
    means = np.array([m.mean.numpy() for m in clients])
    variances = np.array([m.var.numpy() for m in clients])
    mean = rule(means)
    found = pool(clients, create_aggregator(name, f=2))
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.var, rule(variances) + rule((means - mean) ** 2), rtol=1e-12)


def test_the_count_of_a_byzantine_client_has_no_weight():
    clients = reports()
    honest = pool(clients, create_aggregator("median", f=1))
    assert honest.count == 7 * statistics.median(m.count for m in clients)
    false = replace(clients[0], count=1e18)
    found = pool([false, *clients[1:]], create_aggregator("median", f=1))
    assert found.count <= 7 * max(m.count for m in clients[1:])
    assert torch.equal(found.mean, honest.mean)
    assert torch.equal(found.var, honest.var)


def test_a_layer_reported_by_one_client_is_not_trusted():
    silent = [replace(m, count=0.0) for m in reports()[1:]]
    with pytest.raises(TooFewClientsError, match="gets 1;"):
        pool([reports()[0], *silent], create_aggregator("median", f=1))
    assert pool(silent, create_aggregator("median", f=1)).count == 0


def merge_of(aggregate, counters):
    moments = reports(len(counters))
    layer = type("Layer", (), {"momentum": 0.1})()
    said = [LayerStats(m, batches) for m, batches in zip(moments, counters, strict=True)]
    return MergeInput(said, [1] * len(said), aggregate, layer)


def test_the_counter_of_a_byzantine_client_is_outvoted():
    before = RunningStats(torch.zeros(4).double(), torch.ones(4).double(), 10)
    counters = [11, 11, 11, 11, 10**9]
    for aggregate, expected in ((weighted_mean, 10**9), (create_aggregator("median", f=1), 11)):
        merge = merge_of(aggregate, counters)
        for found in (average(merge), pool_statistics(merge), ema_update(before, merge)):
            assert found.num_batches == expected
    pooled = pool([r.moments for r in merge.reports], merge.aggregator)
    torch.testing.assert_close(ema_update(before, merge).mean, 0.1 * pooled.mean)


def test_only_the_weighted_mean_trusts_reported_weights():
    assert weighted_mean.uses_weights
    assert pickle.loads(pickle.dumps(weighted_mean)).uses_weights  # noqa: S301 (made here)
    assert not create_aggregator("median", f=0).uses_weights
    assert not create_aggregator("nnm > mean", f=0).uses_weights


@pytest.fixture
def replies():
    task, clients = task_of("fbn", create_algorithm("dsgd", lr=0.05)), ToyClients(sizes=(5,) * 6)
    received = broadcast(task, task.initial_state)
    return [client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(6)]


def test_distances_are_between_whole_updates():
    """Krum takes all of one client's update: tensor by tensor it would take several clients'."""
    parts = [
        {"a": torch.tensor([x]), "b": torch.tensor([[y, y]]), "n": torch.tensor(3 + i)}
        for i, (x, y) in enumerate([(0.0, 9.0), (0.1, 1.0), (5.0, 1.1), (4.0, 1.2), (0.2, 3.0)])
    ]
    found = combine_tensors(parts, [1] * 5, create_aggregator("krum", f=1))
    assert list(found) == ["a", "b", "n"]
    chosen = [p for p in parts if torch.equal(p["a"], found["a"])]
    assert torch.equal(found["b"], chosen[0]["b"])
    assert found["n"] == 5  # of integers the median
    apart = combine_tensors([{"a": p["a"]} for p in parts], [1] * 5, create_aggregator("krum", f=1))
    assert not torch.equal(apart["a"], found["a"])
    assert found["a"].untyped_storage().nbytes() == found["a"].nbytes  # can be saved by itself


def test_types_are_combined_separately():
    parts = [
        {"a": torch.full((2,), float(i)), "b": torch.full((3,), float(i)).double()}
        for i in range(5)
    ]
    found = combine_tensors(parts, [1] * 5, create_aggregator("median", f=1))
    assert found["a"].dtype is torch.float32
    assert found["b"].dtype is torch.float64
    assert found["a"].tolist() == [2.0] * 2
    assert combine_tensors([{}] * 5, [1] * 5, create_aggregator("median", f=1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["median", "nnm > trimmed_mean", "multi_krum", "geometric_median"])
def test_a_byzantine_client_does_not_break_the_round(replies, text):
    def corrupt(reply):
        update = {name: torch.full_like(t, -1e30) for name, t in reply.update.items()}
        stats = {
            path: LayerStats(
                Moments(1e12, r.moments.mean * 0 + 1e15, r.moments.var * 0 + 1e15),
                r.num_batches + 999,
            )
            for path, r in reply.stats.items()
        }
        return replace(reply, update=update, stats=stats, examples=10**9)

    task = task_of("fbn", create_algorithm("dsgd", lr=0.05))
    task = replace(
        task,
        aggregator=create_aggregator(text, 1),
        statistics_aggregator=create_aggregator(text, 1),
    )
    honest = server_round(task, task.initial_state, replies[1:])
    after = server_round(task, task.initial_state, [corrupt(replies[0]), *replies[1:]])
    for name, weight in after.weights.items():
        torch.testing.assert_close(weight, honest.weights[name], rtol=0, atol=0.5)
    for path, running in after.running.items():
        assert running.num_batches == honest.running[path].num_batches
        torch.testing.assert_close(running.mean, honest.running[path].mean, rtol=0.5, atol=1.0)
        assert (running.var >= 0).all()
        assert (running.var < 10 * honest.running[path].var + 10).all()
