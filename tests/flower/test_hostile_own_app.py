"""One hostile node in an app of one's own: `NormStrategy` loses its reply and nothing else."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam, QFedAvg

import fednorm.flower
from fednorm.engines.flower import wire
from fednorm.engines.flower.node_answers import NodeNumbers
from flower.federation import Nodes
from flower.test_hostile_nodes import arrays, drop, fail, forge_sender, npy, only, put, raw, reply
from flower.test_server_strategies import Net, with_fednorm

NODES, HOSTILE = 4, 998  # the node of partition 2
LARGE = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10**13,), }")
TRAINED = {
    "nothing": reply(),
    "no header": drop(wire.HEADER),
    "no metrics": drop(wire.METRICS),
    "no weights": drop(wire.WEIGHTS),
    "two records of weights": reply(arrays=ArrayRecord(), b=ArrayRecord()),
    "client is a text": put(wire.HEADER, client="x"),
    "client is a list": put(wire.HEADER, client=["x"]),
    "layers of others": put(wire.HEADER, layers=["x"]),
    "layers of bytes": put(wire.HEADER, layers=[b"x"]),
    "examples are a list": put(wire.METRICS, **{wire.EXAMPLES: [1]}),
    "examples are NaN": put(wire.METRICS, **{wire.EXAMPLES: math.nan}),
    "no examples": put(wire.METRICS, **{wire.EXAMPLES: 0}),
    "negative examples": put(wire.METRICS, **{wire.EXAMPLES: -18}),
    "complex weights": arrays(wire.WEIGHTS, lambda _, a: a.astype(complex)),
    "weights are NaN": arrays(wire.WEIGHTS, lambda _, a: a * math.nan),
    "a mean of shape [1, C]": arrays(wire.STATISTICS, only("mean", lambda a: a[None])),
    "a mean without shape": arrays(wire.STATISTICS, only("mean", lambda _: np.float32(1)[()])),
    "batches are huge": arrays(wire.STATISTICS, only("batches", lambda a: a + 2**62)),
    "no array": raw(b"hello"),
    "a zip file": raw(b"PK\x03\x04" + b"\0" * 40),
    "odd header": raw(npy("{'descr': [('a', ")),
    "huge shape": raw(LARGE),
    "another sender": forge_sender,
    "cannot be unpacked": fail,
}
METRICS = {
    "other metrics": put(wire.METRICS, mine=1.0),
    "a list": put(wire.METRICS, train_loss=[1.0, 2.0]),
}
TESTED = {
    "nothing": reply(),
    "no metrics": drop(wire.METRICS),
    "metrics of settings": reply(metrics=ConfigRecord()),
    "two metrics": reply(metrics=MetricRecord({"num-examples": 1}), more=MetricRecord()),
    "other metrics": put(wire.METRICS, mine=1.0),
    "a list": put(wire.METRICS, eval_loss=[1.0]),
    "examples are a list": put(wire.METRICS, **{wire.EXAMPLES: [1]}),
    "no examples": put(wire.METRICS, **{wire.EXAMPLES: 0}),
    "the examples of all others": put(wire.METRICS, **{wire.EXAMPLES: -18}),
    "another name": reply(results=MetricRecord({"num-examples": 1, "eval_loss": 1.0})),
    "cannot be unpacked": fail,
}


def run(forge, kind, server=None, app=None, **limits):
    torch.manual_seed(0)
    around = ({"server": server} if server else settings()) | limits
    ours = fednorm.flower.NormStrategy("fbn", model=Net(), **around)
    grid = Nodes(app or with_fednorm(), NODES)

    def only_once_asked(asked, answer):
        return forge(asked, answer) if asked.metadata.message_type == kind else answer

    if forge:
        grid.forge[HOSTILE] = only_once_asked
    return ours, ours.start(grid, num_rounds=2)


def settings():
    return {"min_available_nodes": NODES, "min_train_nodes": NODES, "fraction_evaluate": 1.0}


def adam():
    return FedAdam(eta=0.01, **settings())


@pytest.mark.parametrize("server", [None, adam], ids=["alone", "FedAdam"])
@pytest.mark.parametrize("kind", sorted(TRAINED))
def test_a_reply_that_cannot_be_used_is_rejected_by_name(kind, server):
    ours, result = run(TRAINED[kind], "train", server and server())
    assert [[one.client for one in ours.rejected[i]] for i in (1, 2)] == [[HOSTILE]] * 2
    assert ours.state.round == 2
    assert len(result.train_metrics_clientapp) == len(result.evaluate_metrics_clientapp) == 2
    assert all(weight.isfinite().all() for weight in ours.state.weights.values())


@pytest.mark.parametrize("server", [None, adam], ids=["alone", "FedAdam"])
def test_more_examples_than_a_node_can_have_are_rejected(server):
    many = put(wire.METRICS, **{wire.EXAMPLES: 2**40})
    ours, _ = run(many, "train", server and server(), max_examples=1000)
    assert [one.client for one in ours.rejected[2]] == [HOSTILE]
    assert ours.rejected[2][0].reason == (
        "it reports 1099511627776 examples, but can have 1000 at most"
    )
    honest, _ = run(None, "train", server and server(), max_examples=1000)
    assert not honest.rejected


@pytest.mark.parametrize("kind", sorted(METRICS))
def test_metrics_that_others_do_not_have_are_not_averaged(kind):
    ours, result = run(METRICS[kind], "train")
    assert not ours.rejected  # its update can be used
    assert {*result.train_metrics_clientapp[2]} == {"train_loss"}
    ours, _ = run(METRICS[kind], "train", adam())  # Flower refuses all replies if one differs
    assert [one.client for one in ours.rejected[2]] == [HOSTILE]
    assert ours.state.round == 2


@pytest.mark.parametrize("kind", sorted(TESTED))
def test_an_evaluation_that_cannot_be_used_is_rejected_by_name(kind):
    ours, result = run(TESTED[kind], "evaluate")
    assert {one.client for one in ours.rejected.get(2, ())} <= {HOSTILE}
    assert 0 < result.evaluate_metrics_clientapp[2]["eval_loss"] < 10


def test_a_metric_that_is_no_number_does_not_reach_the_weights(monkeypatch):
    """Flower's QFedAvg multiplies updates by what nodes report as their loss."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # QFedAvg's, for each reply
    key = {"train_loss_key": "train_loss"}
    server = QFedAvg(client_learning_rate=0.05, q=0.2, **key, **settings())
    ours, _ = run(put(wire.METRICS, train_loss=math.nan), "train", server)
    assert all(weight.isfinite().all() for weight in ours.state.weights.values())


def test_the_number_that_a_node_says_is_no_identity():
    """In the name of another node nothing is replaced, and sums are taken in another order only."""
    honest, _ = run(None, "train")
    ours, _ = run(put(wire.HEADER, client=0), "train")
    assert not ours.rejected
    assert len(set(ours.numbers.known.values())) == NODES
    assert ours.numbers.known.keys() == {1000, 999, 998, 997}
    for name, weight in honest.state.weights.items():
        torch.testing.assert_close(ours.state.weights[name], weight)


def test_a_number_that_is_taken_goes_to_no_other_node():
    numbers = NodeNumbers()
    assert numbers.find(50, 1) == 1
    assert numbers.find(51, 1) == 51  # its own id, which no partition has
    assert numbers.find(52, 51) == 52
    assert numbers.find(53, 53) == 53
    assert numbers.find(54, 54) == 54
    assert numbers.find(50, 9) == 1
