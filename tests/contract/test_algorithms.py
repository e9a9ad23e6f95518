"""Every algorithm, and every server optimizer, in every engine, resumed, summed and defended."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import ALGORITHMS, create_algorithm
from fednorm.contract import examine_plugin
from fednorm.core.replies.privacy import Privacy
from fednorm.core.task import Task
from fednorm.engines import ENGINES, stacked
from fednorm.engines.base import EngineRun
from fednorm.engines.loop import rounds
from fednorm.engines.merged_batch import rounds as merged_rounds
from fednorm.experiment.checkpoint import Checkpoint, check_fit, load_newest, save_checkpoint
from fednorm.strategies import STRATEGIES, create_strategy
from support import ToyClients, in_processes, nested_model, task_of, why_not

CLIENTS = ToyClients(sizes=(4, 4, 6), steps=2, absent={2: (1,)})
LR = {"lr": 0.05}
CASES = {
    **{name: (name, LR) for name in ALGORITHMS if name not in {"dsgd", "fedavg"}},
    "server momentum": ("fedavg", {**LR, "server_momentum": 0.9, "server_lr": 0.5}),
    "server adam": ("fedavg", {**LR, "server": "adam"}),
    "server yogi": ("fedavg", {**LR, "server": "yogi"}),
    "server adagrad": ("fedavg", {**LR, "server": "adagrad"}),
    "adamw": ("fedavg", {"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1}),
    "adam on both sides": ("fedavg", {"lr": 0.01, "optimizer": "adam", "server": "adam"}),
}
STATE = ("weights", "momentum", "buffers")
PRIVACY = Privacy(clip=1.0, noise=0.5, clip_statistics=1.0, clients=2.0, rate=0.5)


def task(case, strategy="naive", **changes):
    name, fields = CASES[case]
    made = task_of(strategy, create_algorithm(name, **fields), count=4)
    return replace(made, clients=CLIENTS.clients, **changes)


def run(chosen, count=4, **options):
    return list(rounds(chosen, CLIENTS, count, **options))


def assert_close(found, expected, tolerance=1e-10):
    for part in STATE:
        ours, theirs = getattr(found.state, part), getattr(expected.state, part)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*sorted(ALGORITHMS.keys() & CASES.keys()), "server adam"])
def test_every_strategy_trains(case):
    for strategy in STRATEGIES:
        chosen = task(case, strategy)
        first, second = run(chosen, 2)
        assert all(t.isfinite().all() for t in second.state.weights.values()), strategy
        moved = [
            not torch.equal(t, second.state.weights[n]) for n, t in first.state.weights.items()
        ]
        assert all(moved), strategy
        assert not (*first.rejected, *second.rejected), strategy


@pytest.mark.parametrize("case", CASES)
def test_stacked_clients_give_what_the_loop_gives(case):
    trainer = stacked.StackedTrainer(task(case, "fedbn"), 4)
    alone, together = run(task(case, "fedbn")), run(task(case, "fedbn"), train=trainer.train)
    assert_close(together[-1], alone[-1])


@pytest.mark.parametrize("rule", ["sgd", "adam", "yogi", "adagrad"])
def test_merged_batches_give_what_the_loop_gives(rule):
    algorithm = create_algorithm("dsgd", lr=0.05, server=rule, server_lr=0.02)
    clients = ToyClients(sizes=(4, 6))
    *_, alone = rounds(task_of("fbn", algorithm), clients, 3)
    *_, together = merged_rounds(task_of("fbn", algorithm), clients, 3)
    assert_close(together, alone)


@pytest.mark.parametrize("case", [c for c, (name, _) in CASES.items() if name != "dsgd"])
def test_merged_batches_are_refused(case):
    assert "one step per round" in why_not("merged", task(case), CLIENTS)


@pytest.mark.parametrize("case", ["scaffold", "feddyn", "server adam"])
def test_clients_side_by_side_give_the_same_bits(case):
    *_, alone = run(task(case, "fedtan"), 2)
    *_, found = ENGINES["barrier"].rounds(EngineRun(task(case, "fedtan"), CLIENTS, 2))
    assert_close(found, alone, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scaffold", "feddyn"])
def test_processes_give_the_same_bits(case):
    *_, alone = run(task(case))
    *_, found = in_processes(task(case), CLIENTS, 4)
    assert_close(found, alone, 0.0)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_gives_the_same_bits(case, tmp_path):
    whole = run(task(case))
    half = run(task(case), 2)[-1]
    save_checkpoint(tmp_path, {}, Checkpoint(half.state, half.client_states, {}))
    found, damaged = load_newest(tmp_path, {}, check=lambda c: check_fit(c, task(case), 3, 4))
    assert not damaged
    resumed = run(task(case), start=found)
    assert_close(resumed[-1], whole[-1], 0.0)


@pytest.mark.parametrize("case", CASES)
def test_a_secure_sum_gives_what_single_replies_give(case):
    plain, summed = run(task(case)), run(task(case, secure=True))
    assert_close(summed[-1], plain[-1], 1e-6)
    assert not summed[-1].rejected


@pytest.mark.parametrize("case", CASES)
def test_a_robust_rule_withstands_a_client(case):
    rule = create_aggregator("median")
    found = run(task(case, "gn", aggregator=rule, statistics_aggregator=rule), 3)
    assert all(t.isfinite().all() for t in found[-1].state.weights.values())


@pytest.mark.parametrize("case", CASES)
def test_privacy_is_kept_or_refused_by_name(case):
    name, fields = CASES[case]
    algorithm = create_algorithm(name, **fields)
    make = partial(Task.build, nested_model(), create_strategy("gn"), algorithm, privacy=PRIVACY)
    if algorithm.sends(nested_model().state_dict()):
        with pytest.raises(ValueError, match="privacy cannot be kept"):
            make()
    else:
        run(make(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_keeps_the_contract(name):
    """`fednorm check` calls the same checks."""
    found = list(examine_plugin(name, "algorithm", fast=True))
    assert [one for one in found if one.problem] == []
