"""What every strategy promises, whatever it does; a new one is tested by being registered."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from fednorm import ClientState, broadcast, client_round
from fednorm.algorithms import create_algorithm
from fednorm.contract import CHECKS, examine_plugin
from fednorm.core.messages import download_bytes, upload_bytes
from fednorm.core.task import export
from fednorm.engines.evaluation import is_personal, score_clients, score_global
from fednorm.strategies import STRATEGIES
from support import ToyClients, last, nested_model, task_of

# No module can be named by a keyword of Python.
FILES = {"in": "instance_norm"}
TESTS = Path(__file__).parents[1] / "strategies"
every = pytest.mark.parametrize("name", sorted(STRATEGIES))


@every
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = STRATEGIES[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


@every
def test_has_a_file_of_its_own_that_names_its_paper(name):
    module = importlib.import_module(STRATEGIES[name].__module__)
    assert module.__name__.rpartition(".")[2] == FILES.get(name, name)
    doc = inspect.getdoc(module)
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d+/\S+", doc)
    assert "Server:" in doc or "Stage II" in doc
    assert len(inspect.getsource(module).splitlines()) < 150


@every
def test_has_tests_of_its_own(name):
    module = STRATEGIES[name].__module__.rpartition(".")[2]
    assert "def test_" in (TESTS / f"test_{module}.py").read_text(encoding="utf-8")


@pytest.mark.slow
@every
def test_keeps_the_contract(name):
    """`fednorm check` calls the same checks."""
    found = {one.promise: one.problem for one in examine_plugin(name, "strategy", fast=True)}
    assert len(found) == 1 + len(CHECKS["strategy"])
    assert {promise: problem for promise, problem in found.items() if problem} == {}


@pytest.mark.slow
@every
def test_is_tested_globally_or_per_client(name):
    task, clients = task_of(name, create_algorithm("dsgd", lr=0.05)), ToyClients()
    result = last(task, clients, 2)
    scores = score_clients(task, result.state, result.client_states, clients, range(3))
    assert len(scores) == 3
    assert all(0 <= s.accuracy <= 1 and s.examples == 5 for s in scores.values())
    if not is_personal(task):
        x, y = clients.union(1)
        assert score_global(task, result.state, [(x, y)]).examples == 15


@pytest.mark.slow
@every
def test_message_sizes_are_those_of_the_tensors(name):
    task, clients = task_of(name, create_algorithm("dsgd")), ToyClients()
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, ClientState(), clients.batches(0, 1))
    shared = sum(p.numel() * 8 for p in task.layout.shared.values())
    running = list(received.state.running.values())
    moments = [report.moments for report in reply.stats.values()]
    down = sum(8 * (r.mean.numel() + r.var.numel()) for r in running) + 8 * len(running)
    up = sum(8 * (m.mean.numel() + m.var.numel()) for m in moments) + 24 * len(moments)
    assert download_bytes(received) == shared + down + 8
    assert upload_bytes(reply) == shared + up + 8


@pytest.mark.slow
@every
def test_counters_of_the_trained_model_are_loaded(name):
    task = task_of(name, create_algorithm("dsgd", lr=0.05))
    result = last(task, ToyClients(), 2)
    saved = export(task, result.state, result.client_states[0]).state_dict()
    fresh = task.strategy.convert(nested_model(3)).model
    fresh.load_state_dict(saved, strict=True)
    for key, value in fresh.state_dict().items():
        if "num_batches_tracked" in key:
            assert value.dtype is torch.int64
            # hbn counts the batches of its measurements; heterofl follows none while it trains.
            assert int(value) == {"hbn": 6, "heterofl": 0}.get(name, 2)
