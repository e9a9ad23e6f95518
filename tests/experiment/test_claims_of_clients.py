"""Claims as users meet them: a run names the client, in metrics.jsonl, results and the table."""

import json
from dataclasses import replace

import pytest

import fednorm
from fednorm.engines import evaluation, loop
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment

FALSE = 1
SMALL = {"clients": 4, "rounds": 3, "partition": "dirichlet=0.5", "engine": "loop", "eval_every": 3}
LOCAL = {"algorithm": {"name": "fedavg", "lr": 0.05}, "local_epochs": 1, "participation": 1.0}


@pytest.fixture
def lie(monkeypatch):
    """Let one client change its replies in the second round."""

    def start(change):
        def corrupt(replies, _adversary, number, **_):
            return [change(r) if r.client == FALSE and number == 2 else r for r in replies]

        monkeypatch.setattr(loop, "apply_attack", corrupt)

    return start


@pytest.mark.slow
def test_a_run_names_the_client(lie, tmp_path):
    lie(lambda reply: replace(reply, examples=2**53))
    result = fednorm.simulate("fbn", **SMALL, **LOCAL, out=tmp_path)
    assert (result.status, result.rejected) == ("finished", 1)
    (file,) = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    (found,) = lines[1]["rejected"]
    assert found["client"] == FALSE
    assert "examples, but can have" in found["reason"]
    assert [line for line in lines if "rejected" in line] == [lines[1]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fbn", "naive", "hbn", "dualbn"])
def test_counts_and_counters_are_known_of_our_models(strategy, lie):
    """One value more, or one batch more, than a model of the library can have had."""

    def count_more(reply):
        report = reply.stats[path]
        moments = replace(report.moments, count=report.moments.count * 1.01)
        return replace(reply, stats={**reply.stats, path: replace(report, moments=moments)})

    def jump(reply):
        report = reply.stats[path]
        more = replace(report, num_batches=report.num_batches + 1)
        return replace(reply, stats={**reply.stats, path: more})

    experiment = build_experiment({"strategies": [strategy], "seeds": [0], **SMALL, **LOCAL})
    path = next(iter(prepare(experiment, experiment.strategies[0], 0).task.layout.sharing))
    for change, what in ((count_more, "count"), (jump, "counter")):
        lie(change)
        *_, result = prepare(experiment, experiment.strategies[0], 0).rounds()
        assert not result.rejected
        results = list(prepare(experiment, experiment.strategies[0], 0).rounds())
        (found,) = results[1].rejected
        assert (found.client, found.where) == (FALSE, path)
        assert f"the {what} of layer" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hbn", "heterofl"])
def test_answers_to_a_calibration_are_counted(strategy, monkeypatch, tmp_path):
    def corrupt(answers, *_, **__):
        return [replace(a, examples=2**50) if a.client == FALSE else a for a in answers]

    monkeypatch.setattr(evaluation, "apply_attack", corrupt)
    result = fednorm.simulate(strategy, **SMALL, **LOCAL, out=tmp_path)
    assert result.rejected == 1
    (file,) = tmp_path.glob("runs/*/metrics.jsonl")
    last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    assert [one["client"] for one in last["rejected"]] == [FALSE]


def test_a_declared_maximum_bounds_examples():
    result = fednorm.simulate("gn", **SMALL, **LOCAL, max_examples=1, outlier_factor=0)
    assert result.status == "diverged"
    assert "examples, but can have 1 at most" in result.error


def test_a_factor_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"outlier_factor is 0 .* or at least 1, not 0.5"):
        fednorm.simulate("gn", rounds=1, outlier_factor=0.5)
