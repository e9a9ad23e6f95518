"""Callbacks follow runs, wherever these are made, and may end them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import nan

import pytest

import fednorm
from fednorm.errors import CallbackError, ConfigError
from fednorm.experiment.callbacks import create_callback, may_end_runs, parse_callbacks
from fednorm.experiment.callbacks.base import Monitor, RunStart
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.flower import open_experiment
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.results import Evaluation, Event
from fednorm.experiment.run_folder import choose_folder
from fednorm.experiment.schema.load import build_experiment

SMALL = {"clients": 3, "rounds": 6, "seeds": 1, "eval_every": 2, "batch_size": 8}
MINE = """
from fednorm import Callback

class EndsAt(Callback):
    def __init__(self, round=3, raises=False):
        self.at, self.raises = round, raises

    def on_round(self, event):
        if event.round == self.at and self.raises:
            raise KeyError("lost")
        return event.round >= self.at

class Watches(Callback):
    observes = True
"""


class Notes(fednorm.Callback):
    """Notes all that it is told."""

    observes = True

    def __init__(self):
        self.told = []

    def on_start(self, start):
        self.told.append(("start", start.strategy, start.seed, start.done, len(start.history)))

    def on_round(self, event):
        self.told.append(("round", event.strategy, event.seed, event.round))

    def on_evaluation(self, event):
        self.told.append(("evaluation", event.strategy, event.seed, event.round))

    def on_end(self, result):
        self.told.append(("end", result.strategy, result.seed, result.status))

    def on_skip(self, result):
        self.told.append(("skip", result.strategy, result.seed, result.rounds))


def of_run(notes, strategy, seed=0):
    return [
        (what, told) for what, name, number, told, *_ in notes if (name, number) == (strategy, seed)
    ]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine", None)  # whatever another test has imported by this name
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_all_that_happens_is_told_in_this_process(workers, tmp_path):
    notes, more = Notes(), {"strategies": ["gn", "fbn"], "out": tmp_path, "workers": workers}
    fednorm.compare(callbacks=[notes], **{**SMALL, **more})
    rounds = [("round", n) for n in range(1, 7)]
    tested = [
        (w, n) for what, n in rounds for w in ([what, "evaluation"] if n % 2 == 0 else [what])
    ]
    expected = [("start", 0), *tested, ("end", "finished")]
    assert of_run(notes.told, "gn") == expected
    assert of_run(notes.told, "fbn") == expected
    notes.told.clear()
    fednorm.compare(callbacks=[notes], **{**SMALL, **more})
    assert notes.told == [("skip", "gn", 0, 6), ("skip", "fbn", 0, 6)]


@pytest.mark.slow
def test_a_run_ends_after_the_same_round_whatever_process_makes_it(mine):
    """Slow to answer, or not: a worker waits for the answer."""
    more = {
        **SMALL,
        "strategies": ["gn", "fbn"],
        "rounds": 30,
        "callbacks": ["mine:EndsAt(round=5)"],
    }
    found = [fednorm.compare(**more, out=mine / f"{n}", workers=n) for n in (1, 2)]
    for run in (run for comparison in found for run in comparison.runs):
        assert (run.status, run.stopped_by, run.rounds) == ("stopped early", "EndsAt", 5)
        assert [one.round for one in run.history] == [2, 4, 5]  # the model that is kept is tested
        assert run.model() is not None
    assert [r.history for r in found[0].runs] == [r.history for r in found[1].runs]
    notes = Notes()
    again = fednorm.compare(**{**more, "callbacks": [*more["callbacks"], notes]}, out=mine / "1")
    assert {what for what, *_ in notes.told} == {"skip"}
    assert again.runs == found[0].runs


def test_the_patience_of_early_stopping_is_counted_anew_by_a_run_that_resumes(tmp_path):
    stopping = {"name": "early_stopping", "metric": "loss", "mode": "max", "patience": 2}
    chosen = build_experiment({**SMALL, "strategies": ["gn"], "rounds": 9, "callbacks": [stopping]})
    whole = run_comparison(chosen, folder=tmp_path / "whole")
    assert (whole.runs[0].status, whole.runs[0].rounds) == ("stopped early", 6)  # the loss falls

    def interrupt(event):
        if event.round == 5:
            raise KeyboardInterrupt

    notes = Notes()
    folder = tmp_path / "parts"
    (cut,) = run_comparison(chosen, folder=folder, monitor=Monitor([Followed(interrupt)])).runs
    assert (cut.status, cut.rounds) == ("interrupted", 5)
    parts = run_comparison(chosen, folder=folder, monitor=Monitor([notes]))
    assert notes.told[0] == ("start", "gn", 0, 5, 2)
    assert [r.history for r in parts.runs] == [r.history for r in whole.runs]
    assert parts.runs[0].stopped_by == "early_stopping"


class Followed(fednorm.Callback):
    """Calls a function with every round, and never ends a run."""

    observes = True

    def __init__(self, function):
        self.on_round = function


def feed(callback, values, **about):
    """Return after which of some evaluations a callback ends the run."""
    callback.on_start(RunStart("fbn", 0, 100))
    for number, value in enumerate(values, start=1):
        tested = replace(
            Evaluation(number, 0.5, 1.0, 1.0), **{about.get("metric", "accuracy"): value}
        )
        if callback.on_evaluation(Event("fbn", 0, number, 1.0, evaluation=tested)):
            return number
    return None


@pytest.mark.parametrize(
    ("fields", "values", "end"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.1, 0.9], 4),
        ({"patience": 2}, [0.1, 0.2, 0.1, 0.3, 0.2], None),
        ({"patience": 1}, [0.1, nan, 0.9], 2),
        ({"patience": 2, "min_delta": 0.2}, [0.1, 0.2, 0.25, 0.9], 3),
        ({"patience": 1, "metric": "loss"}, [1.0, 0.5, 0.5], 3),
        ({"patience": 1, "metric": "loss", "mode": "max"}, [1.0, 0.5], 2),
        ({"patience": 1, "mode": "min"}, [0.3, 0.2, 0.3], 3),
    ],
)  # fmt: skip
def test_early_stopping_waits_for_an_improvement(fields, values, end):
    callback = create_callback("early_stopping", **fields)
    for _ in range(2):  # a run that starts again begins anew
        assert feed(callback, values, **fields) == end


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"patience": 0}, "patience is 1 evaluation or more, not 0"),
        ({"metric": "acuracy"}, "did you mean 'accuracy'"),
        ({"min_delta": -1}, "min_delta is 0 or more"),
        ({"mode": "most"}, "mode is 'auto', 'max' or 'min'"),
        ({"wait": 1}, "unknown field of callback 'early_stopping' 'wait'"),
    ],
)
def test_early_stopping_says_what_is_wrong(fields, text):
    with pytest.raises(ValueError, match=text):
        create_callback("early_stopping", **fields)


@pytest.mark.parametrize("given", [3, object(), Notes])
def test_what_cannot_follow_runs_is_refused(given):
    with pytest.raises(
        ConfigError, match=r"is not a callback: it has none of|is a class; a callback"
    ):
        fednorm.compare(["gn"], callbacks=[given], **SMALL)


def test_a_named_class_that_cannot_follow_runs_is_refused():
    with pytest.raises(ConfigError, match=r"Fraction\(0, 1\) is not a callback"):
        fednorm.compare(["gn"], callbacks=["fractions:Fraction"], **SMALL)


def test_a_metric_that_evaluations_do_not_have_is_told():
    with pytest.raises(CallbackError, match=r"early_stopping failed .*'worst', but .* have none"):
        fednorm.compare(["gn"], callbacks=["early_stopping(metric=worst)"], **SMALL)


class Slow(Notes):
    """Is slow to fail at its first start."""

    def on_start(self, start):
        if self.failing:
            time.sleep(2.0)
            raise OSError("the server cannot be reached")
        super().on_start(start)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_run_is_made_before_a_callback_has_heard_of_its_start(workers, tmp_path):
    notes, more = Slow(), {"strategies": ["gn", "fbn"], "out": tmp_path, "workers": workers}
    notes.failing = True
    with pytest.raises(CallbackError, match=r"Slow failed in on_start .*before round 1"):
        fednorm.compare(callbacks=[notes], **{**SMALL, **more})
    assert not list(tmp_path.glob("runs/*/run.json"))
    notes.failing = False
    fednorm.compare(callbacks=[notes], **{**SMALL, **more})
    assert {what for what, *_ in notes.told} == {"start", "round", "evaluation", "end"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_that_fails_ends_the_runs_and_nothing_is_lost(workers, mine):
    more = {**SMALL, "strategies": ["gn", "fbn"], "seeds": 1, "eval_every": 2, "workers": workers}
    failing = {"name": "mine:EndsAt", "round": 4, "raises": True}
    with pytest.raises(
        CallbackError,
        match=r"callback EndsAt failed in on_round \((gn|fbn), seed 0, after round 4\): "
        r"KeyError: 'lost' \[mine.py, line 10\]\. What is done is kept",
    ):
        fednorm.compare(**more, callbacks=[failing], out=mine / "parts")
    assert any((mine / "parts").glob("runs/*/checkpoint-00000004-*"))
    never = {"name": "mine:EndsAt", "round": 99}
    whole = fednorm.compare(**more, callbacks=[never], out=mine / "whole")
    # Another setting of a callback that may end runs is another experiment.
    with pytest.raises(ConfigError, match="holds an experiment with other values of callbacks"):
        fednorm.compare(**more, callbacks=[never], out=mine / "parts")
    source = (mine / "mine.py").read_text().replace("and self.raises", "and False")
    source = source.replace(">= self.at", ">= 99")
    (mine / "mine.py").write_text(source)
    sys.modules.pop("mine", None)
    again = fednorm.compare(**more, callbacks=[failing], out=mine / "parts")
    assert [r.history for r in again.runs] == [r.history for r in whole.runs]


def test_only_callbacks_that_may_end_runs_belong_to_an_experiment(mine):
    del mine
    plain = build_experiment(SMALL)
    named = [build_experiment({**SMALL, "callbacks": [c]}) for c in ("tensorboard", "mine:Watches")]
    ending = build_experiment({**SMALL, "callbacks": ["early_stopping(patience=5)"]})
    assert {choose_folder(e) for e in named} == {choose_folder(plain)}
    assert choose_folder(ending).name.endswith("early_stopping-patience=5")
    assert may_end_runs("mine:EndsAt")


def test_objects_are_recorded_if_they_may_end_runs(tmp_path):
    stopping = create_callback("early_stopping", patience=50)
    fednorm.compare(["gn"], callbacks=[stopping, Notes()], out=tmp_path, **SMALL)
    notes = Notes()
    named = ["early_stopping(patience=50)"]  # the same, by name
    fednorm.compare(["gn"], callbacks=[*named, notes], out=tmp_path, **SMALL)
    assert notes.told == [("skip", "gn", 0, 6)]
    with pytest.raises(ConfigError, match="other values of callbacks"):
        fednorm.compare(["gn"], callbacks=[lambda event: event.round > 2], out=tmp_path, **SMALL)


def test_a_function_gets_every_round_and_may_end_the_run():
    result = fednorm.simulate("gn", callbacks=[lambda event: event.round == 3], rounds=9, clients=3)
    assert (result.status, result.rounds) == ("stopped early", 3)
    assert result.stopped_by.endswith("<lambda>")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("early", "unknown callback 'early'; did you mean 'early_stopping'"),
        ("early_stopping(patience)", "write for example 'early_stopping\\(patience=5\\)'"),
        ("early_stopping(patience=many)", "patience = 'many' is not valid"),
    ],
)
def test_names_and_fields_are_checked_before_anything_is_run(text, error):
    with pytest.raises(ConfigError, match=error):
        build_experiment({"callbacks": [text]})


def test_texts_may_have_fields():
    """In Python as well, where a text alone is one name or several."""
    text = "early_stopping(metric=loss, mode=max, patience=1)"
    (run,) = fednorm.compare(["gn"], callbacks=text, **SMALL).runs
    assert run.status == "stopped early"
    assert parse_callbacks("a:B(x=[1, 2], y=up), wandb") == [
        {"name": "a:B", "x": [1, 2], "y": "up"},
        {"name": "wandb"},
    ]


def test_an_experiment_that_is_sent_imports_no_callback(tmp_path, monkeypatch):
    """Neither when it is read, nor when a run of it is named."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    sent = build_experiment({**SMALL, "callbacks": ["evil:Callback"]}).model_dump_json()
    assert json.loads(sent)["callbacks"]
    with open_experiment(sent, allow="") as read:
        assert read.callbacks == []
        assert choose_folder(read)
    with pytest.raises(SystemExit, match="imported"):
        may_end_runs("evil:Callback")


@pytest.mark.slow
def test_ctrl_c_resume_early_stop_and_the_same_command_again(mine):
    command = [sys.executable, "-m", "fednorm", "compare", "--strategies", "gn,fbn", "--seeds", "1"]
    command += [
        "--clients",
        "3",
        "--rounds",
        "4000",
        "--out",
        "o",
        "--callback",
        "mine:EndsAt(round=900)",
    ]
    command += ["--set", "eval_every=300", "--checkpoint-every", "50", "--workers", "1"]
    first = subprocess.Popen(command, cwd=mine, stderr=subprocess.PIPE, text=True)
    metrics = mine / "o" / "runs" / "gn-seed0" / "metrics.jsonl"
    while first.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        pass
    os.kill(first.pid, signal.SIGINT)
    told = first.communicate(timeout=60)[1]
    assert first.returncode == 130, told
    assert "the same command continues" in told
    done = len(metrics.read_text().splitlines())
    assert 0 < done < 900
    subprocess.run(command, cwd=mine, check=True, capture_output=True)
    runs = json.loads((mine / "o" / "results.json").read_text())["runs"]
    assert [(r["status"], r["rounds"]) for r in runs] == [("stopped early", 900)] * 2
    before = {path: path.stat().st_mtime_ns for path in (mine / "o").glob("runs/*/*")}
    again = subprocess.run(command, cwd=mine, check=True, capture_output=True, text=True)
    assert "stopped by EndsAt" in " ".join(again.stdout.split())
    assert before == {path: path.stat().st_mtime_ns for path in (mine / "o").glob("runs/*/*")}


def test_runs_with_a_kept_policy_leave_checkpoints_of_their_last_round_only(tmp_path):
    chosen = build_experiment({**SMALL, "strategies": ["gn"]})
    for most, kept in ((0, 0), (10**9, 1)):
        folder = tmp_path / str(most)
        run_comparison(chosen, folder=folder, saving=CheckpointPolicy(every=2, most_kept=most))
        assert len(list(folder.glob("runs/*/checkpoint-00000006-*"))) == kept
        assert len(list(folder.glob("runs/*/checkpoint-*"))) == kept
