"""Every registered attack, with every target, on strategies of every kind."""

import dataclasses
import inspect
import re

import pytest
import torch

from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS, create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.attacks import ATTACKS, create_attack
from fednorm.attacks.adversary import Adversary
from fednorm.attacks.base import DataInfo
from fednorm.contract import CHECKS, examine_plugin
from fednorm.core.task import Task
from fednorm.engines.base import Faults, PoisonedClients
from fednorm.engines.loop import rounds
from fednorm.strategies import create_strategy
from support import CLASSES, SHAPE, ToyClients, nested_model

every = pytest.mark.parametrize("name", sorted(ATTACKS))
SPEAKING = ["naive", "fbn", "dualbn", "hbn"]  # clients report statistics in every round
SILENT = ["heterofl", "fedbn", "gn"]


@every
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = ATTACKS[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert inspect.getdoc(cls).endswith(".")
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


@every
def test_names_its_paper_and_says_what_a_client_does(name):
    doc = inspect.getdoc(ATTACKS[name])
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d+/\S+", doc)
    assert "Client:" in doc
    assert len(inspect.getsource(ATTACKS[name]).splitlines()) < 150


@every
def test_keeps_the_contract(name):
    """`fednorm check` calls the same checks."""
    found = list(examine_plugin(name, "attack"))
    assert [one for one in found if one.problem] == []
    assert len(found) > len(CHECKS["attack"])


def attacked_run(name, chosen, target, rule="nnm > trimmed_mean"):
    clients = ToyClients(sizes=(4, 4, 4, 4, 4))
    adversary = Adversary(create_attack(name), frozenset({3}), target, seed=0)
    source = clients
    if adversary.attack.on_data:
        source = PoisonedClients(clients, adversary, DataInfo(CLASSES, torch.ones(SHAPE)))
    task = Task.build(
        nested_model(),
        create_strategy(chosen),
        create_algorithm("dsgd", lr=0.01),
        rounds=2,
        aggregator=create_aggregator(rule, 1),
        statistics_aggregator=create_aggregator(rule.replace("trimmed_mean", "median"), 1),
    )
    *_, last = rounds(task, source, 2, faults=Faults(adversary))
    assert last.state.round == 2
    for tensor in last.state.weights.values():
        assert torch.isfinite(tensor).all()
    for running in last.state.running.values():
        assert torch.isfinite(running.mean).all()
        assert (running.var >= 0).all()
    return last


TARGETED = [
    (name, target)
    for name, cls in sorted(ATTACKS.items())
    for target in (["both"] if cls.on_data else ["updates", "statistics", "both"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), TARGETED)
@pytest.mark.parametrize("chosen", [*SPEAKING, *SILENT])
def test_a_defended_server_survives(name, target, chosen):
    last = attacked_run(name, chosen, target)
    noticed = name == "non_finite" and (target != "statistics" or chosen in SPEAKING)
    assert {one.client for one in last.rejected} == ({3} if noticed else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sign_flip", "non_finite"])
def test_exchanges_in_mid_round_go_on(name):
    attacked_run(name, "fedtan", "both")


RULES = [*AGGREGATORS, *(f"{stage} > median" for stage in PRE_AGGREGATORS)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chosen", ["naive", "fbn"])
def test_every_rule_combines_updates_and_statistics(rule, chosen):
    attacked_run("sign_flip", chosen, "both", rule)
