"""One hostile node of several: whatever it answers, it loses its own reply and nothing else."""

import json
import math
import struct
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import LayerUse
from fednorm.data.sampling import Plan
from fednorm.engines.base import Faults, Limits
from fednorm.engines.evaluation import Transport, calibrate_for_test
from fednorm.engines.flower import wire
from fednorm.engines.loop import rounds
from fednorm.errors import NonFiniteLossError
from fednorm.experiment.flower.nodes import client
from fednorm.experiment.flower.server_app import server
from fednorm.experiment.flower.submit import LineReader
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import Monitor, run
from fednorm.experiment.run_folder import MetricsFile
from fednorm.experiment.schema.load import build_experiment
from flower.federation import Nodes
from flower.test_parity import LOCAL, STEP, linked, nodes
from support import ToyClients, task_of

CLIENTS = ToyClients(sizes=(3, 5, 4, 4))
HOSTILE, NODE = 2, 998
REMOTE = Faults(limits=Limits(remote=True))


def put(key, **values):
    """Return a forgery that writes values into a record of the answer."""

    def forge(_asked, answer):
        answer.content[key].update(values)
        return answer

    return forge


def drop(*keys):
    def forge(_asked, answer):
        for key in keys:
            answer.content.pop(key, None)
        return answer

    return forge


def arrays(key, change):
    """Return a forgery that changes the arrays of a record, all of them."""

    def forge(_asked, answer):
        found = {name: array.numpy() for name, array in answer.content[key].items()}
        answer.content[key] = ArrayRecord({n: Array(change(n, a)) for n, a in found.items()})
        return answer

    return forge


def raw(data, stype="numpy.ndarray"):
    """Return a forgery of the bytes of the first weight."""

    def forge(_asked, answer):
        found = dict(answer.content[wire.WEIGHTS])
        first = next(iter(found))
        found[first] = Array("float64", (1,), stype, data)
        answer.content[wire.WEIGHTS] = ArrayRecord(found)
        return answer

    return forge


def npy(header):
    text = (header + " " * (64 - (len(header) + 11) % 64) + "\n").encode("latin1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def only(name, change):
    return lambda found, value: change(value) if found == name else value


def reply(**records):
    def forge(asked, _answer):
        return Message(RecordDict(dict(records)), reply_to=asked)

    return forge


def head(**values):
    return ConfigRecord({"version": wire.VERSION, **values})


def pending(site="0#0/mean", value=(0.0, 0.0), **values):
    record = ArrayRecord({"value": Array(np.array(value))})
    said = head(site=site, **{"weight": 1.0, **values})
    return reply(**{wire.HEADER: said, "fednorm.pending": record})


def forge_sender(asked, answer):
    del asked
    answer.metadata.__dict__["_src_node_id"] = 1000
    return answer


def forge_reply_to(asked, answer):
    del asked
    answer.metadata.__dict__["_reply_to_message_id"] = "m0"
    return answer


def fail(*_):
    raise KeyError("no such class")  # as Flower's unpacking of a node's bytes does


NAN, INF = math.nan, math.inf
FORGED = {
    "nothing": reply(),
    "header only": reply(**{wire.HEADER: head()}),
    "header of arrays": reply(**{wire.HEADER: ArrayRecord()}),
    "other version": put(wire.HEADER, version="x"),
    "no metrics": drop(wire.METRICS),
    "no weights": drop(wire.WEIGHTS),
    "no statistics": drop(wire.STATISTICS),
    "metrics of arrays": reply(**{wire.HEADER: head(), wire.METRICS: ArrayRecord()}),
    "metric is a list": put(wire.METRICS, loss=[0.1, 0.2]),
    "own metric is a list": put(wire.METRICS, mine=[0.1]),
    "loss is NaN": put(wire.METRICS, loss=NAN),
    "says that its loss is NaN": put(wire.HEADER, loss=NAN),
    "says that its loss is inf": put(wire.HEADER, loss=INF),
    "says a finite loss": put(wire.HEADER, loss=0.5),
    "says a text as loss": put(wire.HEADER, loss="x"),
    "says a list as loss": put(wire.HEADER, loss=["x"]),
    "diverged": reply(**{wire.HEADER: head(loss=NAN)}),
    "examples is a list": put(wire.METRICS, **{wire.EXAMPLES: [3]}),
    "examples is a float": put(wire.METRICS, **{wire.EXAMPLES: 3.0}),
    "no examples": put(wire.METRICS, **{wire.EXAMPLES: 0}),
    "negative examples": put(wire.METRICS, **{wire.EXAMPLES: -3}),
    "layers is a text": put(wire.HEADER, layers="x"),
    "layers of others": put(wire.HEADER, layers=["x"]),
    "layers of bytes": put(wire.HEADER, layers=[b"\xff"]),
    "complex weights": arrays(wire.WEIGHTS, lambda _, a: a.astype(np.complex128)),
    "complex statistics": arrays(wire.STATISTICS, only("mean", lambda a: a.astype(complex))),
    "a mean of shape [1, C]": arrays(wire.STATISTICS, only("mean", lambda a: a[None])),
    "a mean of integers": arrays(wire.STATISTICS, only("mean", lambda a: a.astype(np.int64))),
    "a mean of nothing": arrays(wire.STATISTICS, only("mean", lambda a: a[:0])),
    "a mean without shape": arrays(wire.STATISTICS, only("mean", lambda _: np.float64(1.0)[()])),
    "sizes of one dimension": arrays(wire.STATISTICS, only("sizes", np.ravel)),
    "huge sizes": arrays(wire.STATISTICS, only("sizes", lambda a: a + 2**62)),
    "negative sizes": arrays(wire.STATISTICS, only("sizes", lambda a: -a)),
    "batches are NaN": arrays(wire.STATISTICS, only("batches", lambda a: a * NAN)),
    "batches are inf": arrays(wire.STATISTICS, only("batches", lambda a: a * INF)),
    "batches are huge": arrays(wire.STATISTICS, only("batches", lambda a: a + 2**62)),
    "count is NaN": arrays(wire.STATISTICS, only("count", lambda a: a * NAN)),
    "samples are zero": arrays(wire.STATISTICS, only("samples", lambda a: a * 0)),
    "weights are NaN": arrays(wire.WEIGHTS, lambda _, a: a * NAN),
    "weights of texts": arrays(wire.WEIGHTS, lambda _, a: np.array(["x"] * a.size)),
    "weights of times": arrays(wire.WEIGHTS, lambda _, a: np.zeros(a.shape, "M8[s]")),
    "weights of records": arrays(wire.WEIGHTS, lambda _, a: np.zeros(a.shape, "f4,i4")),
    "other byte order": arrays(wire.WEIGHTS, lambda _, a: a.astype(">f8")),
    "no bytes": raw(b""),
    "no array": raw(b"hello"),
    "a zip file": raw(b"PK\x03\x04" + b"\0" * 40),
    "other type": raw(b"", "pickle"),
    "huge shape": raw(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10**13,), }")),
    "larger shape": raw(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999,), }")),
    "negative shape": raw(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }")),
    "odd header": raw(npy("{'descr': [('a', ")),
    "deep header": raw(npy("(" * 5000)),
    "header of zeros": raw(npy("\0" * 20)),
    "objects": raw(npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }") + b"cos\n"),
    "pending": pending(),
    "pending without value": reply(**{wire.HEADER: head(), "fednorm.pending": ArrayRecord()}),
    "another sender": forge_sender,
    "cannot be unpacked": fail,
}  # fmt: skip


def train(name, forge, step=LOCAL, count=2, **more):
    task, grid = task_of(name, step, count=count), nodes(name, step, clients=CLIENTS, count=count)
    link = linked(grid, task, CLIENTS)
    grid.forge[NODE] = forge
    return list(rounds(task, CLIENTS, count, train=link.train, faults=REMOTE, **more))


def without(name, step=LOCAL, count=2):
    absent = dict.fromkeys(range(1, count + 1), (HOSTILE,))
    task = task_of(name, step, count=count)
    return list(rounds(task, replace(CLIENTS, absent=absent), count))


def assert_equal_states(one, other):
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    for path, running in other.running.items():
        assert torch.equal(one.running[path].mean, running.mean)
        assert torch.equal(one.running[path].var, running.var)


@pytest.fixture(scope="module")
def expected():
    return without("fbn")


@pytest.mark.parametrize("kind", sorted(FORGED))
def test_a_reply_that_cannot_be_used_is_rejected_by_name_and_the_others_count(kind, expected):
    found = train("fbn", FORGED[kind])
    for result in found:
        assert [one.client for one in result.rejected] == [HOSTILE]
        assert 0 < len(result.rejected[0].reason) <= 300
        assert result.rejected[0].reason.isprintable()
        assert result.dropped_out == 0
    assert_equal_states(found[-1].state, expected[-1].state)


# What the server knows of a node whose data it does not know: the work of a round.
WORK = Faults(limits=Limits(remote=True, plan=Plan(5), layers={"stem.1": LayerUse(1.0)}))
CLAIMED = {
    "a counter": (arrays(wire.STATISTICS, only("batches", lambda a: a + 2**30)), "the counter of"),
    "one batch more": (arrays(wire.STATISTICS, only("batches", lambda a: a + 1)), "the counter of"),
    "samples": (arrays(wire.STATISTICS, only("samples", lambda a: a * 2)), "the samples of"),
}


def train_knowing(name, step, forge, count=1, faults=WORK):
    task, grid = task_of(name, step, count=count), nodes(name, step, clients=CLIENTS, count=count)
    link = linked(grid, task, CLIENTS)
    if forge:
        grid.forge[NODE] = forge
    return list(rounds(task, CLIENTS, count, train=link.train, faults=faults))


@pytest.mark.parametrize("step", [LOCAL, STEP], ids=["fedavg", "dsgd"])
@pytest.mark.parametrize("kind", sorted(CLAIMED))
def test_a_node_cannot_claim_more_work_than_a_round_has(kind, step):
    forge, reason = CLAIMED[kind]
    for result in train_knowing("fbn", step, forge):
        assert [one.client for one in result.rejected] == [HOSTILE]
        assert reason in result.rejected[0].reason


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_where_all_clients_count_the_same_a_node_cannot_count_more(name):
    forge = put(wire.METRICS, **{wire.EXAMPLES: 2**40})
    (result,) = train_knowing("fbn", create_algorithm(name, lr=0.05), forge)
    assert [one.client for one in result.rejected] == [HOSTILE]
    assert "it reports 1099511627776 examples, but can have 1 at most" in result.rejected[0].reason


def test_a_node_cannot_claim_steps_that_a_round_does_not_have():
    forge = arrays(wire.MOMENTUM, lambda _, steps: np.full_like(steps, 3000))
    (result,) = train_knowing("fbn", create_algorithm("fednova", lr=0.05), forge)
    assert "its 'steps' is 3000, but must be from 1 to 1" in result.rejected[0].reason


def test_batches_of_epochs_are_bounded_by_the_examples_of_the_first_reply():
    forge = arrays(wire.STATISTICS, only("batches", lambda a: a + 2**20))
    late = Faults(limits=Limits(remote=True, plan=Plan(2, steps=None, epochs=3)))
    task, grid = task_of("naive", LOCAL, count=2), nodes("naive", clients=CLIENTS, count=2)
    link = linked(grid, task, CLIENTS)
    running = rounds(task, CLIENTS, 2, train=link.train, faults=late)
    assert not next(running).rejected
    grid.forge[NODE] = forge
    assert "the counter of layer" in next(running).rejected[0].reason
    most = Faults(limits=replace(late.limits, max_examples=5))
    (result,) = train_knowing("naive", LOCAL, forge, faults=most)
    assert "but can be 9000 at most" in result.rejected[0].reason


@pytest.mark.parametrize("name", ["heterofl", "alignbn"])
@pytest.mark.parametrize("step", [LOCAL, STEP], ids=["fedavg", "dsgd"])
def test_a_node_weighs_in_a_calibration_what_it_weighed_at_first(name, step):
    task, grid = task_of(name, step), nodes(name, step, clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)
    ask = Transport(ask=link.ask, limits=WORK.limits)
    assert not calibrate_for_test(task, task.initial_state, {}, CLIENTS, ask).rejected
    grid.forge[NODE] = put(wire.METRICS, **{wire.EXAMPLES: 2**40})
    (found,) = calibrate_for_test(task, task.initial_state, {}, CLIENTS, ask).rejected
    assert found.client == HOSTILE
    assert found.reason == "it reports 1099511627776 examples, but can have 12 at most"


def test_what_a_message_says_of_its_question_does_not_matter():
    for result in train("fbn", forge_reply_to):
        assert not result.rejected
        assert len(result.replies) == 4


def test_a_node_that_vanishes_is_counted():
    task, grid = task_of("fbn", LOCAL), nodes("fbn", clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)
    grid.lost = {NODE}
    (result,) = rounds(task, CLIENTS, 1, train=link.train, faults=REMOTE)
    assert (result.dropped_out, result.rejected) == (1, ())


class Waiting:
    """A node that waits for ever, at another place each time."""

    def __init__(self, site, value=(1e6, 1e6), weight=1e6):
        self.site, self.value, self.weight, self.times = site, value, weight, 0

    def __call__(self, asked, answer):
        self.times += 1
        assert self.times < 1000, "it is held for ever"
        if asked.metadata.message_type != "train":
            return answer
        return pending(self.site.format(self.times), self.value, weight=self.weight)(asked, answer)


@pytest.mark.parametrize("site", ["x", "{}", "1#0/mean"])
@pytest.mark.parametrize("name", ["naive", pytest.param("fedtan", marks=pytest.mark.slow)])
def test_a_node_that_waits_for_ever_neither_holds_the_server_nor_takes_it_over(name, site):
    found = train(name, Waiting(site), STEP, count=1)
    assert [one.client for one in found[-1].rejected] == [HOSTILE]
    assert "it waits" in found[-1].rejected[0].reason
    assert_equal_states(found[-1].state, without(name, STEP, count=1)[-1].state)


@pytest.mark.slow
def test_a_node_that_does_not_wait_with_the_others_loses_its_part_in_the_exchange_only():
    early = []

    def keep(_asked, answer):
        if "fednorm.pending" not in answer.content:
            early.append(answer.content)
        return answer

    (honest,) = train("fedtan", keep, STEP, count=1)
    assert honest.exchanges > 5

    def finish(asked, _answer):
        return Message(early[-1], reply_to=asked)

    (found,) = train("fedtan", finish, STEP, count=1)
    assert [reply.client for reply in found.replies] == [0, 1, 2, 3]
    assert not any(reply.fault for reply in found.replies)
    assert found.exchanges == honest.exchanges


def test_after_the_last_exchange_that_a_model_has_no_node_is_waited_for():
    """Of two nodes neither is the majority, so that places are counted."""
    two = ToyClients(sizes=(4, 4))
    task, grid = task_of("fedtan", STEP), nodes("fedtan", STEP, clients=two, count=20)
    link = linked(grid, task, two)
    link.uses = {path: LayerUse(1.0) for path in task.layout.norms}
    grid.forge[999] = forge = Waiting("{}")
    (result,) = rounds(task, two, 1, train=link.train, faults=REMOTE)
    assert forge.times <= 3 * len(task.layout.norms) + 1
    assert [one.client for one in result.rejected] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, NAN, 1e300])
def test_an_exchange_weighs_what_a_number_of_values_can(weight):
    places = []

    def forge(_asked, answer):
        if "fednorm.pending" in answer.content:
            places.append(answer.content[wire.HEADER]["site"])
            answer.content[wire.HEADER]["weight"] = weight
        return answer

    (found,) = train("fedtan", forge, STEP, count=1)
    assert len(places) == 1
    assert "with the weight" in found.rejected[0].reason
    assert_equal_states(found.state, without("fedtan", STEP, count=1)[-1].state)


def test_a_loss_of_most_nodes_that_is_no_number_is_a_divergence():
    task, grid = task_of("fbn", LOCAL), nodes("fbn", clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)
    grid.forge = dict.fromkeys((1000, 999), FORGED["diverged"])
    (result,) = rounds(task, CLIENTS, 1, train=link.train, faults=REMOTE)
    assert [one.reason for one in result.rejected] == ["its loss is nan"] * 2
    grid.forge[NODE] = FORGED["diverged"]
    with pytest.raises(NonFiniteLossError, match="round 1 at client 0"):
        next(rounds(task, CLIENTS, 1, train=link.train, faults=REMOTE))


def take(partition):
    """Return a forgery that claims a partition."""

    def forge(asked, answer):
        if asked.metadata.message_type == "query.partition":
            answer.content[wire.HEADER]["partition"] = partition
        return answer

    return forge


def test_a_node_that_claims_a_partition_does_not_replace_its_holder():
    grid = nodes("fbn", clients=CLIENTS, count=20)
    late = grid.contexts.pop(997)  # of client 3
    link = linked(grid, task_of("fbn", LOCAL), CLIENTS, timeout=0.1)
    assert link.nodes == {0: 1000, 1: 999, 2: 998}
    grid.contexts[997], grid.forge[997] = late, take(0)
    link.connect([0])
    link._look([0])
    assert link.nodes == {0: 1000, 1: 999, 2: 998}
    holder = grid.contexts.pop(1000)
    assert link.nodes[0] == 997  # as if the holder had been started again
    grid.contexts[1000] = holder
    assert link.nodes[0] == 1000


@pytest.mark.parametrize("partition", ["x", [1], 1.5, b"1", True])
def test_a_partition_that_is_no_number_is_told(partition, caplog):
    grid = nodes("fbn", clients=CLIENTS, count=20)
    grid.forge[NODE] = take(partition)
    assert linked(grid, task_of("fbn", LOCAL), CLIENTS, timeout=0.1).nodes.keys() == {0, 1, 3}
    assert f"node {NODE} cannot be used" in caplog.text


SCORES = {
    "no metrics": drop(wire.METRICS),
    "an accuracy of 1e9": put(wire.METRICS, accuracy=1e9),
    "accuracy is NaN": put(wire.METRICS, accuracy=NAN),
    "accuracy is a list": put(wire.METRICS, accuracy=[1.0]),
    "negative examples": put(wire.METRICS, examples=-5),
    "examples are inf": put(wire.METRICS, examples=INF),
    "nothing": reply(),
    "metrics of settings": reply(**{wire.METRICS: ConfigRecord()}),
    "cannot be unpacked": fail,
}


@pytest.mark.parametrize("kind", sorted(SCORES))
def test_an_evaluation_that_cannot_be_used_is_rejected_by_name(kind):
    task, grid = task_of("fbn", LOCAL), nodes("fbn", clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)
    grid.forge[NODE] = SCORES[kind]
    scores = link.score_clients(task.initial_state, CLIENTS.all(), adapt=0.0)
    assert sorted(scores) == [0, 1, 3]
    assert [one.client for one in link.take_rejections()] == [HOSTILE]
    assert not link.take_rejections()


MEASURED = ["nothing", "no statistics", "metrics of arrays", "layers of others", "count is NaN"]


@pytest.mark.parametrize("kind", MEASURED)
def test_statistics_that_cannot_be_used_are_rejected_by_name(kind):
    task, grid = task_of("heterofl", LOCAL), nodes("heterofl", clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)
    grid.forge[NODE] = FORGED[kind]
    after = calibrate_for_test(task, task.initial_state, {}, CLIENTS, Transport(ask=link.ask))
    assert [one.client for one in after.rejected] == [HOSTILE]


def test_a_node_that_is_the_last_one_to_answer_is_one_reply_as_well(monkeypatch, expected):
    """When its bytes are unpacked, no other answer is waited for."""
    task, grid = task_of("fbn", LOCAL, count=2), nodes("fbn", clients=CLIENTS, count=2)
    link = linked(grid, task, CLIENTS)
    grid.forge[NODE], grid.pull_interval = fail, 0.0
    pull, looks = grid.pull_messages, Counter()

    def wait(ids):
        looks.update(ids)
        late = isinstance(grid.waiting.get(ids[0]), Exception) and looks[ids[0]] < 3
        return [] if late else pull(ids)

    monkeypatch.setattr(grid, "pull_messages", wait)
    found = list(rounds(task, CLIENTS, 2, train=link.train, faults=REMOTE))
    assert [[one.client for one in result.rejected] for result in found] == [[HOSTILE]] * 2
    assert_equal_states(found[-1].state, expected[-1].state)


def test_a_node_that_joins_later_cannot_end_the_run(caplog):
    grid = nodes("fbn", clients=CLIENTS, count=20)
    late = grid.contexts.pop(NODE)
    link = linked(grid, task_of("fbn", LOCAL), CLIENTS, timeout=0.1)
    grid.contexts[NODE], grid.forge[NODE] = late, fail
    link._look(CLIENTS.all())  # it is the only one that is asked
    assert HOSTILE not in link.nodes
    assert f"node {NODE} cannot be used" in caplog.text


def test_the_superlink_that_cannot_be_reached_is_no_fault_of_nodes(monkeypatch):
    task, grid = task_of("fbn", LOCAL), nodes("fbn", clients=CLIENTS, count=20)
    link = linked(grid, task, CLIENTS)

    def unreachable(*_):
        monkeypatch.setattr(grid, "get_node_ids", unreachable)
        raise ConnectionError("it is gone")

    monkeypatch.setattr(grid, "pull_messages", unreachable)
    with pytest.raises(ConnectionError):
        next(rounds(task, CLIENTS, 1, train=link.train, faults=REMOTE))


def test_rejected_and_lost_replies_are_in_events_results_and_metrics(tmp_path, monkeypatch, capsys):
    """A run as a SuperLink makes it, with personal layers, which are tested on the nodes."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    values = {"strategies": ["fedbn"], "seeds": 1, "rounds": 2, "clients": 3, "eval_every": 1}
    experiment = build_experiment(values | {"engine": "flower", "timeout": 1})
    config = {"experiment": experiment.model_dump_json()}
    grid = Nodes(client, 3, None, config)

    def forge(asked, answer):
        kind = asked.metadata.message_type
        if kind == "evaluate":
            return SCORES["an accuracy of 1e9"](asked, answer)
        return FORGED["metric is a list"](asked, answer) if kind == "train" else answer

    def lose(messages):
        grid.lost = {999} if any(m.metadata.message_type == "train" for m in messages) else set()
        return ask(messages)

    ask, grid.push_messages = grid.push_messages, lose
    grid.forge[NODE] = forge
    server(grid, Context(7, 1, {}, RecordDict(), config))
    reader = LineReader()
    found = [m for m in map(reader.read, capsys.readouterr().out.splitlines()) if m]
    events, (result,) = [m.event for m in found if m.event], [m.result for m in found if m.result]
    reasons = [[one.reason for one in event.rejected] for event in events]
    assert all("must be one number" in one and "accuracy is 1000000000.0" in two
               for one, two in reasons)  # fmt: skip
    assert (result.status, result.rejected, result.dropped_out) == ("finished", 4, 2)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(events[0])
    metrics.file.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [one["client"] for one in line["rejected"]] == [HOSTILE, HOSTILE]
    assert line["dropped_out"] == 1
    assert len(line["per_client"]) == 1  # a node that never trained is not tested


def test_a_run_that_loses_all_nodes_is_stopped_and_not_called_diverged(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    values = {"strategies": ["fbn"], "seeds": 1, "rounds": 2, "clients": 2, "engine": "flower"}
    experiment = build_experiment(values | {"timeout": 1})
    config = {"experiment": experiment.model_dump_json()}
    grid = Nodes(client, 2, None, config)
    prepared = prepare(experiment, experiment.strategies[0], 0)
    prepared.remote.open = lambda: nullcontext(grid)

    def lose(_event):
        grid.lost = set(grid.contexts)

    result = run(prepared, Monitor([lose]))
    assert (result.status, result.rounds) == ("stopped", 1)
    assert "none arrived" in result.error
