"""Random damage to what one node of four sends, as the server unpacks it from the wire.

Three honest nodes answer as always. Whatever the fourth sends, the server must neither fail nor
wait, and must use the honest answers; what it makes of the damaged one is counted.
"""

import logging
import math
import random
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import fednorm.flower
from fednorm.algorithms import create_algorithm
from fednorm.engines.base import Faults, Limits
from fednorm.engines.evaluation import Transport, calibrate_for_test
from fednorm.engines.flower.remote_clients import RemoteClients
from fednorm.engines.loop import rounds
from flower.federation import Nodes
from flower.test_parity import LOCAL, STEP, nodes
from flower.test_server_strategies import Net, with_fednorm
from support import ToyClients, task_of

CLIENTS = ToyClients(sizes=(3, 5, 4, 4))
HOSTILE, NODE = 2, 998
PATIENCE = 30.0  # seconds for one message, on a busy machine
REMOTE = Faults(limits=Limits(remote=True))
NUMBERS = (0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 0.5, math.nan, math.inf, -math.inf, 1e300)
TEXTS = ("", "x", "\x1b[2J", "0#0/mean", "fednorm.pending", "é" * 500, "[/x]")
KINDS = ("f4", "f8", "f2", "i8", "u1", "?", "c16", ">f8", "U3", "M8[s]", "f4,i4")
HEADERS = (b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00", b"PK\x03\x04", b"\x93NUMPY\x01\x00\xff\xff{")


def draw_value(rng):
    """Return what a header can hold."""
    one = rng.choice((*NUMBERS, *TEXTS, b"\xff\x00", True))
    return one if rng.random() < 0.7 else [one] * rng.randrange(4)


def draw_number(rng):
    one = rng.choice(NUMBERS)
    return one if rng.random() < 0.7 else [one] * rng.randrange(4)


def draw_record(rng):
    """Return a small record of any kind."""
    array = Array(np.full(rng.randrange(4), float(rng.choice(NUMBERS))))
    return rng.choice(
        (
            ArrayRecord({rng.choice(("value", "mean", "x")): array}),
            MetricRecord({rng.choice(("loss", "num-examples", "x")): draw_number(rng)}),
            ConfigRecord({rng.choice(("version", "site", "loss", "x")): draw_value(rng)}),
        )
    )


def damage_values(values, rng):
    """Return an array of other numbers, or of another shape or number format."""
    with np.errstate(all="ignore"):
        changes = (
            lambda: values * rng.choice((0, -1, math.nan, math.inf, 1e30, 1e300)),
            lambda: np.zeros(values.shape, rng.choice(KINDS)),
            lambda: values[None],
            lambda: values.ravel()[: rng.randrange(3)],
            lambda: np.concatenate([values.ravel(), values.ravel()]),
            lambda: np.array(rng.choice((1.0, math.nan))),
            lambda: values + rng.choice((1, 2**31, 2**62)),
        )
        return np.asarray(rng.choice(changes)())


def damage_bytes(data, rng):
    """Return bytes with some of them changed, removed or added."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, how = rng.randrange(len(found) + 1), rng.randrange(4)
        if how == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del found[at : at + rng.choice((1, 8, 1000))]
        elif how == 2:
            found[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        else:
            found = bytearray(rng.choice(HEADERS)) + found[at:]
    return bytes(found)


def damage_array(array, rng):
    if rng.random() < 0.5:
        return Array(damage_values(array.numpy(), rng))
    stype = rng.choice((array.stype, array.stype, "pickle"))
    # Most faults are where the header is.
    head = damage_bytes(array.data[:128], rng)
    return Array(array.dtype, array.shape, stype, head + array.data[128:])


def damage_record(record, rng):
    """Change, remove or add one entry of a record."""
    found, name = dict(record), rng.choice([*record, "x"])
    if rng.random() < 0.2:
        found.pop(name, None)
    elif isinstance(record, ArrayRecord):
        array = found.get(name, Array(np.zeros(2)))
        found[name] = damage_array(array, rng)
    elif isinstance(record, MetricRecord):
        found[name] = draw_number(rng)
    else:
        found[name] = draw_value(rng)
    return type(record)(found)


def damage_content(content, rng):
    """Change, remove or add one record of a message."""
    found, name = dict(content), rng.choice([*content, "fednorm.pending", "x"])
    how = rng.random()
    if how < 0.15:
        found.pop(name, None)
    elif how < 0.3:
        found[name] = draw_record(rng)
    elif name in found:
        found[name] = damage_record(found[name], rng)
    return RecordDict(found)


def damage_message(answer, rng):
    """Return what a hostile node sends: a message, or the objects that Flower makes of it."""
    content = answer.content
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = damage_content(content, rng)
    answer.content = content
    if rng.random() < 0.1:
        field = rng.choice(("_src_node_id", "_reply_to_message_id", "_message_type", "_ttl"))
        told = {"_src_node_id": 1000, "_ttl": math.inf}
        answer.metadata.__dict__[field] = told.get(field, "m0")
    if rng.random() < 0.7:
        return answer
    found = get_all_nested_objects(answer)
    objects = {number: found[number].deflate() for number in reversed(found)}
    hit = rng.choice(list(objects))
    return {**objects, hit: damage_bytes(objects[hit], rng)}


class _Remembered:
    """An app that answers the same question by the same answer, without training again."""

    def __init__(self, app):
        self.app, self.known = app, {}

    def __call__(self, message, context):
        answers = len(message.content.get("fednorm.answers", {}))
        key = (context.node_id, message.metadata.message_type, answers)
        if key not in self.known:
            self.known[key] = self.app(message, context).content
        return Message(RecordDict(self.known[key].copy()), reply_to=message)


class Fuzzer:
    """Sends damaged answers to one of the places where the server reads one."""

    def __init__(self, seed):
        self.rng, self.counts, self.crashes = random.Random(seed), Counter(), []  # noqa: S311
        self.links = {
            name: self._link(name, STEP if name == "fedtan" else LOCAL)
            for name in ("fbn", "naive", "fedtan", "heterofl")
        }
        # These send more than an update.
        more = {name: create_algorithm(name, lr=0.05) for name in ("scaffold", "fednova")}
        self.links |= {name: self._link("fbn", algorithm) for name, algorithm in more.items()}
        own = _Remembered(with_fednorm())
        self.own = Nodes(own, CLIENTS.clients)
        self.targets = {
            "reply": (40, self._train),
            "exchange": (2, lambda: self._train("fedtan")),
            "calibration": (15, self._calibrate),
            "evaluation": (15, self._evaluate),
            "partition": (10, self._connect),
            "own reply": (12, lambda: self._run_own("train")),
            "own evaluation": (7, lambda: self._run_own("evaluate")),
        }

    @staticmethod
    def _link(name, step):
        grid = nodes(name, step, clients=CLIENTS, count=20)
        grid.app = _Remembered(grid.app)
        link = RemoteClients(grid, task_of(name, step), 0, 7, 1.0)
        link.connect(CLIENTS.all())
        return grid, link

    def run(self, count):
        """Send `count` damaged answers; return how often what happened."""
        names, weights = zip(*((n, w) for n, (w, _) in self.targets.items()), strict=True)
        for number in range(count):
            name = self.rng.choices(names, weights)[0]
            begun = time.monotonic()
            try:
                outcome = self.targets[name][1]()
            except Exception as error:  # noqa: BLE001 (that is what it looks for)
                outcome = "crash"
                self.crashes.append((number, name, f"{type(error).__name__}: {error}"))
            if time.monotonic() - begun > PATIENCE:
                self.crashes.append((number, name, "it is held up"))
            self.counts[name, outcome] += 1
        return self.counts

    @contextmanager
    def _forging(self, grid, kind):
        def forge(asked, answer):
            return damage_message(answer, self.rng) if kind(asked) else answer

        grid.forge[NODE] = forge
        yield
        grid.forge.clear()
        grid.sent.clear()
        grid.waiting.clear()

    def _train(self, name=None):
        usual = ("fbn", "naive", "scaffold", "fednova")
        grid, link = self.links[name or self.rng.choice(usual)]
        at = self.rng.randrange(12) if name else 0  # the exchange at which it turns hostile

        def turned(asked):
            return len(asked.content.get("fednorm.answers", {})) >= at

        with self._forging(grid, turned):
            (result,) = rounds(link.task, CLIENTS, 1, train=link.train, faults=REMOTE)
        used = {r.client for r in result.replies} - {one.client for one in result.rejected}
        assert used >= {0, 1, 3}, f"honest clients are rejected: {result.rejected}"
        kept = (*result.state.weights.values(), *result.state.momentum.values())
        assert all(tensor.isfinite().all() for tensor in kept)
        return "used" if HOSTILE in used else "rejected" if result.rejected else "missing"

    def _calibrate(self):
        grid, link = self.links["heterofl"]
        with self._forging(grid, lambda _: True):
            state, ask = link.task.initial_state, Transport(ask=link.ask)
            after = calibrate_for_test(link.task, state, {}, CLIENTS, ask)
        assert {one.client for one in after.rejected} <= {HOSTILE}
        assert all(running.mean.isfinite().all() for running in after.running.values())
        return "rejected" if after.rejected else "used"

    def _evaluate(self):
        grid, link = self.links["fbn"]
        with self._forging(grid, lambda _: True):
            scores = link.score_clients(link.task.initial_state, CLIENTS.all(), adapt=0.0)
        assert scores.keys() >= {0, 1, 3}
        assert all(0 <= score.accuracy <= 1 for score in scores.values())
        return "rejected" if link.take_rejections() else "used"

    def _connect(self):
        grid, link = self.links["naive"]
        with self._forging(grid, lambda _: True):
            new = RemoteClients(grid, link.task, 0, 7, 0.0)
            new.connect(CLIENTS.all())
        # Of two nodes that claim a place at the same moment, one must wait.
        replaced = [c for c, node in {0: 1000, 1: 999, 3: 997}.items() if new.nodes[c] != node]
        assert all(new.claims[client][0] == NODE for client in replaced), new.claims
        assert len(replaced) <= 1
        if replaced:
            return "first"
        return "used" if NODE in new.nodes.values() else "rejected"

    def _run_own(self, kind):
        torch.manual_seed(0)
        share = float(kind == "evaluate")
        ours = fednorm.flower.NormStrategy(
            "fbn", model=Net(), min_available_nodes=4, min_train_nodes=4, fraction_evaluate=share
        )
        with self._forging(self.own, lambda asked: asked.metadata.message_type == kind):
            result = ours.start(self.own, num_rounds=1)
        assert ours.state.round == 1
        assert all(weight.isfinite().all() for weight in ours.state.weights.values())
        if kind == "evaluate":
            assert result.evaluate_metrics_clientapp[1]["eval_loss"] is not None
        gone = {one.client for one in ours.rejected.get(1, ())}
        assert gone <= {NODE}
        return "rejected" if gone else "used"


def fuzz(count, seed):
    """Send `count` damaged answers; return counts of outcomes, and what went wrong."""
    logging.disable(logging.WARNING)
    try:
        fuzzer = Fuzzer(seed)
        fuzzer.run(count)
    finally:
        logging.disable(logging.NOTSET)
    return fuzzer.counts, fuzzer.crashes
