"""`calibrate = "rounds"`: rounds that begin with a calibration, against plain torch by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.attacks import ATTACKS, Adversary
from fednorm.core.messages import RunningStats, report_bytes
from fednorm.core.round import broadcast, client_calibration, client_round, server_round
from fednorm.core.task import export
from fednorm.engines import merged_batch, stacked
from fednorm.engines.base import Faults
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.engines.loop import rounds
from fednorm.nn import rules
from fednorm.strategies import create_strategy
from support import ToyClients, in_processes, last, nested_model, task_of

LOCAL = create_algorithm("fedavg", lr=0.05, momentum=0.9)
STEP = create_algorithm("dsgd", lr=0.05)
CLIENTS = ToyClients(sizes=(5, 2, 9), steps=2, absent={2: (1,)})
SHARING = ["naive", "fbn", "dualbn", "fixbn", "fedtan", "brn", "switchnorm"]


def assert_close(one, other):
    for name, value in other.weights.items():
        torch.testing.assert_close(one.weights[name], value, rtol=1e-9, atol=1e-11)
    for path, running in other.running.items():
        torch.testing.assert_close(one.running[path].mean, running.mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(one.running[path].var, running.var, rtol=1e-9, atol=1e-11)
        assert one.running[path].num_batches == running.num_batches


def measure_by_hand(state, clients, asked):
    """Pool the inputs of torch's own layers, each batch normalised by itself."""
    model, seen = nested_model().train(), {}
    with torch.no_grad():
        for name, value in state.weights.items():
            model.get_parameter(name).copy_(value)
    norms = {p: m for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for path, layer in norms.items():
        layer.register_forward_pre_hook(
            lambda _m, args, path=path: seen.setdefault(path, []).append(args[0].transpose(0, 1))
        )
    with torch.no_grad():
        for client in asked:
            for x, _ in clients.all_batches(client).steps:
                model(x)
    found = {}
    for path, parts in seen.items():
        values = torch.cat([part.flatten(1) for part in parts], 1)
        batches = state.running[path].num_batches + 3  # three batches of each client
        found[path] = RunningStats(values.mean(1), values.var(1), batches)
    return found


def test_statistics_are_those_of_the_clients_of_the_round_at_its_weights():
    """The second round lacks a client, whose data count in the first alone."""
    task = task_of("fbn", LOCAL, calibrate="rounds")
    *_, result = rounds(task, CLIENTS, 3)
    by_hand, state = task_of("fbn", LOCAL), task.initial_state
    for number in (1, 2, 3):
        asked = CLIENTS.participants(number)
        state = replace(state, running=measure_by_hand(state, CLIENTS, asked))
        received = broadcast(by_hand, state)
        own = [CLIENTS.batches(client, number) for client in asked]
        replies = [client_round(by_hand, received, by_hand.initial_client_state, b)[0] for b in own]
        state = server_round(by_hand, state, replies)
    assert_close(result.state, state)


@pytest.mark.parametrize("name", SHARING)
def test_a_test_is_calibrated_on_all_clients(name):
    fields = {"freeze_round": 5} if name == "fixbn" else {}
    task = task_of(name, STEP, calibrate="evaluation", **fields)
    clients = ToyClients(sizes=(5, 2, 9), absent={1: (0,)})
    result = last(task, clients, 1)
    tested = calibrate_for_test(task, result.state, {}, clients)
    assert result.exchanges == last(task_of(name, STEP, **fields), clients, 1).exchanges
    if name in ("naive", "fbn"):
        expected = measure_by_hand(result.state, clients, clients.all())
        assert_close(tested, replace(result.state, running=expected))
    assert any(
        not torch.equal(tested.running[path].mean, running.mean)
        for path, running in result.state.running.items()
    )
    assert torch.isfinite(export(task, tested)(clients.union(1)[0])).all()


@pytest.mark.parametrize("name", ["naive", "fbn", "fixbn", "fedtan"])
def test_merged_batches_give_the_same(name):
    clients = ToyClients(sizes=(3, 5, 4), absent={2: (1,)})
    made = [task_of(name, STEP, count=3, calibrate="rounds") for _ in range(2)]
    expected = list(rounds(made[0], clients, 3))
    for ours, other in zip(merged_batch.rounds(made[1], clients, 3), expected, strict=True):
        assert_close(ours.state, other.state)
        assert ours.exchanges == other.exchanges
        assert ours.bytes_down == other.bytes_down
        assert ours.bytes_up == other.bytes_up


@pytest.mark.parametrize("name", ["fbn", "dualbn", "fixbn"])
def test_stacked_clients_give_the_same(name):
    clients = ToyClients(sizes=(4, 6, 4), steps=2, absent={2: (1,)})
    made = [task_of(name, LOCAL, count=3, calibrate="rounds") for _ in range(2)]
    trainer = stacked.StackedTrainer(made[1], 4)
    for ours, other in zip(
        rounds(made[1], clients, 3, train=trainer.train), rounds(made[0], clients, 3), strict=True
    ):
        assert_close(ours.state, other.state)
        assert ours.exchanges == other.exchanges


@pytest.mark.slow
def test_processes_give_the_same_bits():
    task = task_of("fbn", LOCAL, count=2, calibrate="rounds")
    *_, ours = in_processes(task, CLIENTS, 2)
    expected = last(task_of("fbn", LOCAL, count=2, calibrate="rounds"), CLIENTS, 2)
    for name, value in expected.state.weights.items():
        assert torch.equal(ours.state.weights[name], value)


def test_a_resumed_run_has_the_same_bits():
    task = task_of("dualbn", LOCAL, count=4, calibrate="rounds")
    whole = list(rounds(task, CLIENTS, 4))
    *_, resumed = rounds(task, CLIENTS, 4, whole[1])
    for name, value in whole[-1].state.weights.items():
        assert torch.equal(resumed.state.weights[name], value)
    for path, running in whole[-1].state.running.items():
        assert torch.equal(resumed.state.running[path].mean, running.mean)


def test_the_cost_is_counted():
    plain = last(task_of("fbn", LOCAL), CLIENTS, 1)
    task = task_of("fbn", LOCAL, calibrate="rounds")
    calibrated, sent = last(task, CLIENTS, 1), broadcast(task, task.initial_state)
    own = client_calibration(
        task, sent, task.initial_client_state, CLIENTS.all_batches(0), rules.calibrate_batch
    )
    assert calibrated.exchanges == plain.exchanges + 1
    assert calibrated.bytes_up == plain.bytes_up + report_bytes(own.stats)
    assert calibrated.bytes_down == 2 * plain.bytes_down


def test_byzantine_clients_answer_a_calibration_too():
    clients = ToyClients(sizes=(4, 4, 4, 4, 4))
    task = task_of("fbn", STEP, count=1, calibrate="rounds")
    liar = Adversary(ATTACKS["non_finite"](), frozenset({2}), target="statistics")
    (faulty,) = rounds(task, clients, 1, faults=Faults(liar))
    assert [one.client for one in faulty.rejected] == [2, 2]  # in the calibration and the round
    few = ToyClients(sizes=(4, 4, 4, 4, 4), absent={1: (2,)})
    assert_close(faulty.state, last(task, few, 1).state)
    assert faulty.exchanges == 2
    flip = Adversary(ATTACKS["sign_flip"](), frozenset({2}), target="statistics")
    robust = replace(task, statistics_aggregator=create_aggregator("median", 1))
    (undefended,) = rounds(task, clients, 1, faults=Faults(flip))
    (defended,) = rounds(robust, clients, 1, faults=Faults(flip))
    (without,) = rounds(robust, clients, 1)

    def distance(one):
        return sum(
            float((one.state.running[p].mean - r.mean).abs().sum())
            for p, r in without.state.running.items()
        )

    assert distance(defended) < distance(undefended)


@pytest.mark.parametrize("freeze", [2, 0.5, "auto"])
def test_fixbn_calibrates_once_more_when_stage_two_begins(freeze):
    """Frozen statistics are those of the weights with which stage II begins."""
    fields = {"freeze_round": freeze, "window": 2, "threshold": 1e9}  # 'auto' freezes after two
    task = task_of("fixbn", LOCAL, count=4, calibrate="rounds", **fields)
    clients = ToyClients(sizes=(5, 2, 9), steps=2)
    results = list(rounds(task, clients, 4))
    assert [result.exchanges for result in results] == [2, 2, 2, 1]
    frozen = measure_by_hand(results[1].state, clients, clients.all())
    for result in results[2:]:
        assert_close(
            replace(result.state, weights={}), replace(result.state, weights={}, running=frozen)
        )
        tested = calibrate_for_test(task, result.state, {}, clients)
        assert tested.running is result.state.running
    tested = calibrate_for_test(task, results[1].state, {}, clients)
    assert_close(replace(tested, weights={}), replace(tested, weights={}, running=frozen))


@pytest.mark.parametrize("name", ["fbn", "dualbn"])
def test_unknown_times_are_refused(name):
    with pytest.raises(ValueError, match="'never', 'evaluation' or 'rounds', not 'always'"):
        create_strategy(name, calibrate="always")
