"""Experiments with clients that are Byzantine, drop out or answer badly."""

import json
import logging
from dataclasses import replace

import pytest
import torch

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.attacks import create_attack
from fednorm.attacks.adversary import Adversary, choose_byzantine
from fednorm.engines import loop
from fednorm.engines.base import ATTEMPTS, Faults
from fednorm.errors import ConfigError, NonFiniteLossError, NoUsableReplyError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import Monitor
from fednorm.experiment.run_folder import run_key
from fednorm.experiment.schema.load import build_experiment, expand_sweep
from fednorm.experiment.schema.specs import THREATS
from support import ToyClients, in_processes, run_by_hand, task_of

SMALL = {
    "strategies": ["fbn"],
    "clients": 6,
    "rounds": 3,
    "seeds": [0],
    "batch_size": 8,
    "eval_every": 3,
    "model": {"name": "mlp", "hidden": [16]},
}
ATTACKED = {**SMALL, "attack": "sign_flip", "byzantine": 2}

BAD = [
    ({"byzantine": 3}, "fewer than half of the 6 clients can be Byzantine, but byzantine = 3"),
    ({"attack": "foe"}, "attack 'foe' needs clients that make it"),
    ({"attack": "feo", "byzantine": 1}, "unknown attack 'feo'; did you mean 'foe'"),
    ({"attack": {"name": "foe", "eps": 1}, "byzantine": 1}, "unknown field of attack 'foe' 'eps'"),
    ({"attack_target": "labels"}, "attack_target = 'labels' is not valid"),
    ({"aggregator": "medain"}, "unknown aggregator 'medain'; did you mean 'median'"),
    (
        {"byzantine": 2, "statistics_aggregator": "median", "participation": 0.5},
        "statistics_aggregator, with 3 clients in a round: median with f=2",
    ),
    ({"client_dropout": 1.0}, "client_dropout = 1.0 is not valid"),
    ({"min_replies": 7}, "min_replies = 7, but only 6 clients take part"),
    (
        {"strategies": ["gn"], "attack": "foe", "byzantine": 1, "attack_target": "statistics"},
        "gn: it shares no statistics, so there is nothing to attack",
    ),
    ({"data": "ring", "attack": "backdoor", "byzantine": 1}, "backdoor needs images"),
    (
        {"attack": {"name": "backdoor", "target": 12}, "byzantine": 1},
        "the target 12 and a patch of 3 pixels, but 'digits' has 10 classes",
    ),
    ({"engine": "merged", "attack": "foe", "byzantine": 1}, "clients that all are honest"),
    ({"engine": "merged", "client_dropout": 0.2}, "clients that all are honest"),
    ({"engine": "merged", "aggregator": "median"}, "the mean as aggregator"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_input_is_refused_before_training(values, message):
    with pytest.raises(ConfigError, match=message):
        run_comparison(
            build_experiment({**SMALL, **values}),
            monitor=Monitor([lambda _: pytest.fail("training started")]),
        )


def test_an_entry_may_set_keys_for_itself():
    experiment = build_experiment(
        {
            **SMALL,
            "attack": "foe",
            "byzantine": 2,
            "strategies": [
                {"name": "fbn", "byzantine": 0, "label": "honest"},
                {"name": "fbn", "aggregator": "median", "stats_momentum": 0.3, "label": "median"},
                {"name": "fbn", "attack": {"name": "alie", "z": 1.5}, "label": "alie"},
                "fbn",
                "centralized",
            ],
        }
    )
    honest, median, alie, plain, reference = map(experiment.for_entry, experiment.strategies)
    assert (honest.byzantine, honest.attack) == (0, None)
    assert (median.aggregator, median.byzantine, median.attack.name) == ("median", 2, "foe")
    assert experiment.make_strategy(experiment.strategies[1]).stats_momentum == 0.3
    assert (alie.attack.name, alie.attack.fields) == ("alie", {"z": 1.5})
    assert plain is experiment
    assert (reference.byzantine, reference.attack, reference.aggregator) == (0, None, "mean")
    with pytest.raises(ConfigError, match="fewer than half"):
        build_experiment({**SMALL, "strategies": [{"name": "fbn", "byzantine": 5}]})


def test_sweeps_multiply():
    values = {**SMALL, "strategies": ["naive", "centralized"], "byzantine": 1}
    once = expand_sweep(values, "attack=foe,alie")
    twice = expand_sweep(
        once, "aggregator+statistics_aggregator=mean,nnm > trimmed_mean(f=1),median"
    )
    entries = build_experiment(twice).strategies
    assert [e.title for e in entries[:3]] == [
        "naive, foe, mean",
        "naive, foe, nnm > trimmed_mean(f=1)",
        "naive, foe, median",
    ]
    assert len(entries) == 7
    assert entries[-1].title == "centralized"
    assert entries[1].settings["statistics_aggregator"] == "nnm > trimmed_mean(f=1)"
    numbers = build_experiment(expand_sweep(values, "byzantine=1,2")).strategies
    assert [e.title for e in numbers[:2]] == ["naive byzantine=1", "naive byzantine=2"]
    with pytest.raises(ConfigError, match="--sweep takes"):
        expand_sweep(values, "rounds")


def test_records_of_runs_without_these_keys_stay_valid():
    experiment = build_experiment(SMALL)
    settings = run_key(experiment, experiment.strategies[0], 0)["settings"]
    assert not set(THREATS) & set(settings)
    attacked = build_experiment(ATTACKED)
    assert run_key(attacked, attacked.strategies[0], 0)["settings"]["byzantine"] == 2


def test_an_attack_changes_the_run_and_a_defence_restores_the_statistics():
    entries = [
        {"name": "fbn", "byzantine": 0, "label": "honest"},
        {"name": "fbn", "label": "attacked"},
        {"name": "fbn", "statistics_aggregator": "median", "label": "defended"},
    ]
    chosen = build_experiment({**ATTACKED, "attack_target": "statistics", "strategies": entries})
    means = []
    for entry in chosen.strategies:
        *_, last = prepare(chosen, entry, 0).rounds(None)
        means.append(torch.cat([r.mean for r in last.state.running.values()]))
    honest, attacked, defended = means
    assert not torch.equal(honest, attacked)
    assert (defended - honest).norm() < (attacked - honest).norm()


def test_the_reference_has_honest_clients_that_all_reply():
    reference = {"strategies": ["centralized"], "client_dropout": 0.5}
    (one,) = run_comparison(build_experiment({**SMALL, "strategies": ["centralized"]})).runs
    (other,) = run_comparison(
        build_experiment({**ATTACKED, **reference, "aggregator": "median"})
    ).runs
    assert repr(one.history) == repr(other.history)


@pytest.mark.slow
def test_an_attack_is_the_same_in_one_process_and_in_several():
    task, clients = (
        task_of("fbn", create_algorithm("dsgd", lr=0.05)),
        ToyClients(sizes=(4, 5, 6, 4)),
    )
    conditions = Faults(Adversary(create_attack("gaussian"), frozenset({2}), seed=1), 0.3, 1, 1)
    *_, one = loop.rounds(task, clients, 3, faults=conditions)
    *_, other = in_processes(task, clients, 3, faults=conditions)
    assert one.dropped_out == other.dropped_out
    for name, value in one.state.weights.items():
        assert torch.equal(value, other.state.weights[name])


def test_statistics_are_exact_for_those_that_answered():
    clients = ToyClients(sizes=(4, 5, 6, 3))
    conditions = Faults(client_dropout=0.4, seed=5)
    *_, found = loop.rounds(
        task_of("fbn", create_algorithm("dsgd", lr=0.05)), clients, 4, faults=conditions
    )
    gone = {
        number: set(range(4)) - set(conditions.surviving(range(4), number, 0))
        for number in range(1, 5)
    }
    assert 0 < sum(map(len, gone.values())) < 16
    expected = run_by_hand(
        task_of("fbn", create_algorithm("dsgd", lr=0.05)), replace(clients, absent=gone), 4
    )
    for path, running in expected.running.items():
        assert torch.equal(found.state.running[path].mean, running.mean)
        assert torch.equal(found.state.running[path].var, running.var)


class Sampled(ToyClients):
    """Two of five clients take part in a round, always the same two unless others are asked for."""

    def participants(self, round_):
        del round_
        return [0, 1]


def test_a_round_with_too_few_good_replies_is_repeated_with_other_clients(caplog):
    clients = Sampled(sizes=(4, 4, 4, 4, 4))
    byzantine = Adversary(create_attack("non_finite"), frozenset({0, 1}), seed=0)
    conditions = Faults(byzantine, min_replies=2)
    task = task_of("fbn", create_algorithm("dsgd", lr=0.05))
    with caplog.at_level(logging.WARNING, "fednorm"):
        *_, found = loop.rounds(task, clients, 1, faults=conditions)
    assert found.retries == 1
    assert [one.client for one in found.rejected] == [0, 1]
    assert {reply.client for reply in found.replies} < {2, 3, 4}
    assert "round 1 has no usable reply" in caplog.text
    *_, again = loop.rounds(task, clients, 1, faults=conditions)
    assert [r.client for r in again.replies] == [r.client for r in found.replies]


def test_attempts_are_bounded_and_none_is_made_that_cannot_help():
    task = task_of("fbn", create_algorithm("dsgd", lr=0.05))
    drawn = []

    class Counting(ToyClients):
        def batches(self, client, round_):
            drawn.append(client)
            return super().batches(client, round_)

    clients = Counting(sizes=(4, 4, 4))
    byzantine = Adversary(create_attack("non_finite"), frozenset({0}), seed=0)
    with pytest.raises(NoUsableReplyError, match="only 2 usable replies"):
        list(loop.rounds(task, clients, 1, faults=Faults(byzantine, 0.0, 3)))
    assert len(drawn) == 3  # all were asked: no other client is left
    drawn.clear()
    with pytest.raises(NoUsableReplyError):
        list(loop.rounds(task, clients, 1, faults=Faults(byzantine, 0.001, 3)))
    assert len(drawn) == 3 * ATTEMPTS


def test_a_stopped_run_keeps_its_state_and_says_why(tmp_path):
    values = {**SMALL, "rounds": 40, "client_dropout": 0.3, "min_replies": 6}
    (result,) = run_comparison(build_experiment(values), folder=tmp_path).runs
    assert result.status == "stopped"
    assert "fewer than it needs" in result.error
    assert 0 < result.rounds < 40
    folder = tmp_path / "runs" / "fbn-seed0"
    assert list(folder.glob(f"checkpoint-{result.rounds:08}-*"))
    assert (folder / "model.safetensors").exists()
    assert not (folder / "run.json").exists()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == result.rounds
    assert sum(line.get("retries", 0) for line in lines) == result.retries > 0
    assert sum(line.get("dropped_out", 0) for line in lines) == result.dropped_out > 0
    (again,) = run_comparison(build_experiment(values), folder=tmp_path).runs
    assert (again.status, again.rounds) == ("stopped", result.rounds)


def test_rejected_replies_are_recorded_with_layer_and_reason(tmp_path, caplog):
    values = {**ATTACKED, "attack": "non_finite", "attack_target": "statistics"}
    with caplog.at_level(logging.INFO, "fednorm"):
        (result,) = run_comparison(build_experiment(values), folder=tmp_path).runs
    assert (result.status, result.rejected) == ("finished", 6)
    line = (tmp_path / "runs" / "fbn-seed0" / "metrics.jsonl").read_text().splitlines()[0]
    byzantine = sorted(choose_byzantine(range(6), 2, 0))
    rejected = json.loads(line)["rejected"]
    assert [one["client"] for one in rejected] == byzantine
    assert rejected[0]["reason"].startswith(f"the mean of layer '{rejected[0]['layer']}' is not")
    assert f"fbn, seed 0, round 1: the reply of client {byzantine[0]} is rejected" in caplog.text


def test_byzantine_clients_with_invalid_replies_do_not_stop_a_robust_rule():
    values = {
        **SMALL,
        "clients": 10,
        "byzantine": 4,
        "attack": "non_finite",
        "aggregator": "trimmed_mean",
        "statistics_aggregator": "nnm > median",
    }
    (result,) = run_comparison(build_experiment(values)).runs
    assert (result.status, result.rejected) == ("finished", 12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "processes"])
def test_a_byzantine_client_that_diverges_is_rejected_and_an_honest_one_ends_the_run(engine):
    task, clients = task_of("gn", create_algorithm("dsgd", lr=0.05)), ToyClients(sizes=(4, 4, 4))
    clients = replace(clients, broken=frozenset({1}))
    run = loop.rounds if engine == "loop" else in_processes
    guilty = Faults(Adversary(create_attack("sign_flip"), frozenset({1})))
    *_, last = run(task, clients, 1, faults=guilty)
    assert [(one.client, one.reason) for one in last.rejected] == [(1, "its loss is nan")]
    other = Faults(Adversary(create_attack("sign_flip"), frozenset({0})))
    with pytest.raises(NonFiniteLossError, match="at client 1"):
        list(run(task, clients, 1, faults=other))


@pytest.mark.slow
def test_a_backdoor_has_a_success_rate():
    values = {**SMALL, "byzantine": 2, "rounds": 60, "partition": "iid"}
    made = {"name": "backdoor", "target": 7, "share": 0.5}
    attacked = fednorm.compare(attack=made, **values).runs[0].final
    honest = fednorm.compare(**values).runs[0].final
    assert honest.attack_success is None
    assert attacked.attack_success > 0.5
    (row,) = fednorm.compare(attack=made, **{**values, "rounds": 3}).summaries()
    assert 0 <= row.attack_success <= 1


def test_personal_models_of_byzantine_clients_are_not_tested():
    values = {**ATTACKED, "strategies": ["fedbn"], "attack": "backdoor", "partition": "iid"}
    final = fednorm.compare(**values).runs[0].final
    assert len(final.per_client) == 4
    assert 0 <= final.attack_success <= 1
