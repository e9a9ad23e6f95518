"""Runs that are extended are those of all rounds, bit by bit; others are refused by name."""

import json

import pytest

import fednorm
from fednorm.errors import ConfigError
from fednorm.experiment.callbacks.base import Monitor
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.extension import extend_folder, find_obstacle
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.schema.load import build_experiment
from fednorm.strategies import STRATEGIES

# Seven unequal clients, of which some take part: 5 rounds, evaluated after 2, 4 and, to end, 5.
SMALL = {
    "clients": 7,
    "partition": "dirichlet_unbalanced=0.5",
    "participation": 0.6,
    "batch_size": 8,
    "rounds": 5,
    "eval_every": 2,
    "seeds": 1,
    "algorithm": "fedavg",
    "local_steps": 2,
}
FIXBN = {"name": "fixbn", "freeze_round": "auto", "window": 2, "threshold": 1.0}
LOCAL = {"name": "fedavg", "momentum": 0.9, "momentum_state": "local"}
ONE_STEP = {"algorithm": "dsgd", "local_steps": 1}
KINDS = {
    "personal": {"strategies": ["fedbn"], "algorithm": LOCAL},
    "server momentum": {"strategies": ["fbn"], "algorithm": {"name": "fedavg", "server": "adam"}},
    "scaffold": {"strategies": ["naive"], "algorithm": "scaffold"},
    "mixing": {"strategies": ["hbn"]},
    "freezing by itself": {"strategies": [FIXBN]},
    "freezing at the end": {"strategies": [{"name": "fixbn", "freeze_round": 5}]},
    "diagnosed": {"strategies": ["fbn"], **ONE_STEP, "diagnose": True},
    "centralized": {"strategies": ["centralized"], **ONE_STEP},
    "dropping out": {"strategies": ["fbn"], "client_dropout": 0.3, "min_replies": 2},
    "exchanged": {"strategies": ["fedtan"], **ONE_STEP},
    "processes": {"strategies": ["fedbn"], "engine": "processes"},
    "stacked": {"strategies": ["fbn"], "engine": "stacked"},
    "merged": {"strategies": ["fbn"], "engine": "merged", **ONE_STEP},
    "barrier": {"strategies": ["fedtan"], "engine": "barrier", **ONE_STEP},
}


def outcome(folder):
    """Return all that runs leave, but how long they took."""
    files = sorted(p for p in folder.glob("runs/*/**/*") if p.name[:1] != "." and p.is_file())
    names = ("metrics.jsonl", "run.json", "checkpoint")
    plain = {p.relative_to(folder): p.read_bytes() for p in files if not p.name.startswith(names)}
    assert plain
    lines = [p.read_text() for p in files if p.name == "metrics.jsonl"]
    runs = [json.loads(p.read_text()) for p in files if p.name == "run.json"]
    for run in runs:
        del run["result"]["seconds"]
    return plain, lines, runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_extended_is_that_of_all_rounds(kind, tmp_path):
    settings = {**SMALL, **KINDS[kind]}
    whole = run_comparison(build_experiment({**settings, "rounds": 9}), folder=tmp_path / "whole")
    run_comparison(build_experiment(settings), folder=tmp_path / "parts")
    rounds = []
    longer = extend_folder(tmp_path / "parts", build_experiment({**settings, "rounds": 9}))
    run_comparison(longer, folder=tmp_path / "parts", monitor=Monitor([Following(rounds)]))
    assert rounds == [6, 7, 8, 9]
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    assert [e.round for e in whole.runs[0].history] == [2, 4, 6, 8, 9]


class Following(fednorm.Callback):
    """Notes the rounds."""

    observes = True

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round(self, event):
        self.rounds.append(event.round)


@pytest.mark.slow
def test_workers_extend_runs_too_and_stopped_ones_continue(tmp_path):
    """Of three runs one is finished, one was interrupted, and one has not begun."""
    settings = {**SMALL, "strategies": ["gn", "fedbn", "fbn"]}
    whole = fednorm.compare(**{**settings, "rounds": 9}, out=tmp_path / "whole")

    def interrupt(event):
        if (event.strategy, event.round) == ("fedbn", 3):
            raise KeyboardInterrupt

    fednorm.compare(**settings, callbacks=[Called(interrupt)], out=tmp_path / "parts")
    more = {**settings, "rounds": 9, "out": tmp_path / "parts"}
    found = fednorm.compare(**more, extend=True, workers=2)
    assert [r.history for r in found.runs] == [r.history for r in whole.runs]
    again = fednorm.compare(**more, extend=True)
    assert again.runs == found.runs


class Called(fednorm.Callback):
    """Calls a function with every round."""

    observes = True

    def __init__(self, function):
        self.on_round = function


def refuse(folder, **settings):
    with pytest.raises(ConfigError) as refused:
        fednorm.compare(out=folder, extend=True, **{**SMALL, "rounds": 9, **settings})
    return str(refused.value)


@pytest.mark.slow
def test_what_depends_on_all_rounds_is_refused_by_name_with_what_to_set(tmp_path):
    step = {"name": "fedavg", "schedule": "step"}
    settings = {"strategies": ["gn", "fixbn"], "algorithm": step}
    fednorm.compare(out=tmp_path, **{**SMALL, **settings})
    said = refuse(tmp_path, **settings).splitlines()
    assert said[0] == (
        "gn cannot be extended: its learning rate fell after rounds 2 and 3 of 5, shares of all "
        "rounds that are others of 9; keep them with --set algorithm.milestones=[0.277778,0.388889]"
    )
    settings["algorithm"] = {**step, "milestones": [0.277778, 0.388889]}
    (said,) = refuse(tmp_path, **settings).splitlines()
    assert said == (
        "fixbn cannot be extended: statistics freeze after 0.5 of all rounds, which was round 3 of "
        "5 and would be round 5 of 9; keep it with --set strategy.freeze_round=3"
    )
    settings["strategy"] = {"freeze_round": 3}
    whole = fednorm.compare(**{**SMALL, **settings, "rounds": 9})
    found = fednorm.compare(out=tmp_path, extend=True, **{**SMALL, **settings, "rounds": 9})
    assert [r.history for r in found.runs] == [r.history for r in whole.runs]
    assert [r.frozen_from for r in found.runs] == [None, 4]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fixbn"])
def test_no_other_strategy_depends_on_all_rounds(name):
    held, new = (build_experiment({"strategies": [name], "rounds": rounds}) for rounds in (60, 100))
    assert find_obstacle(held, new, held.strategies[0], new.strategies[0]) is None


def test_a_folder_is_extended_with_its_own_settings(tmp_path):
    assert "none was given" in refuse(None)
    assert "holds no config.toml" in refuse(tmp_path)
    fednorm.compare(["gn"], out=tmp_path, **SMALL)
    assert "not to 3" in refuse(tmp_path, strategies=["gn"], rounds=3)
    assert "other values of batch_size" in refuse(tmp_path, strategies=["gn"], batch_size=9)
    assert "other values of eval_every" in refuse(tmp_path, strategies=["gn"], eval_every=3)
    lr = {"name": "fedavg", "lr": 0.5}
    assert "other values of algorithm" in refuse(tmp_path, strategies=["gn"], algorithm=lr)
    with pytest.raises(ConfigError, match=r"fednorm run .* --extend 9"):
        fednorm.compare(["gn"], out=tmp_path, **{**SMALL, "rounds": 9})


@pytest.mark.slow
def test_private_runs_and_chosen_settings_are_not_extended(tmp_path):
    private = {"privacy": {"clip": 1.0, "noise": 0.0}, "strategies": ["gn"]}
    fednorm.compare(out=tmp_path / "private", **{**SMALL, **private})
    assert "private runs cannot be extended" in refuse(tmp_path / "private", **private)
    tuned = {"tune": {"lr": [0.1]}, "strategies": ["gn"]}
    fednorm.compare(out=tmp_path / "tuned", **{**SMALL, **tuned})
    assert "name the chosen values" in refuse(tmp_path / "tuned", **tuned)


def test_a_state_that_was_not_kept_is_told_before_anything_changes(tmp_path):
    chosen = build_experiment({**SMALL, "strategies": ["gn"]})
    run_comparison(chosen, folder=tmp_path, saving=CheckpointPolicy(most_kept=10))
    before = (tmp_path / "config.toml").read_bytes()
    assert "gn seed 0 cannot be extended: the state" in refuse(tmp_path, strategies=["gn"])
    assert (tmp_path / "config.toml").read_bytes() == before


def test_a_run_that_a_callback_ended_stays_ended(tmp_path):
    stopping = ["early_stopping(patience=1, metric=loss, mode=max)"]  # the loss falls
    settings = {"strategies": ["gn"], "callbacks": stopping}
    (early,) = fednorm.compare(out=tmp_path, **{**SMALL, **settings}).runs
    assert early.status == "stopped early"
    longer = {**SMALL, **settings, "rounds": 9}
    assert fednorm.compare(out=tmp_path, extend=True, **longer).runs == (early,)
    assert [r.history for r in fednorm.compare(**longer).runs] == [early.history]
