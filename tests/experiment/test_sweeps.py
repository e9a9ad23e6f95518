"""Sweeps over any key, and settings of single strategies."""

import json

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app
from fednorm.errors import ConfigError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, expand_sweep
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.report.series import collect_sensitivity

TINY = {"rounds": 3, "clients": 3, "seeds": [0]}
RATE = {"name": "dsgd", "lr": 0.1, "momentum": 0.9}
FEDAVG = {"name": "fedavg", "lr": 0.05, "momentum": 0.9}
# These are the same for all runs: what is compared, and the machine.
SHARED = {
    "callbacks",
    "metrics",
    "strategies",
    "strategy",
    "tune",
    "seeds",
    "device",
    "threads",
    "timeout",
    "client_state_memory",
}


def losses(result):
    return {run.strategy: run.final.loss for run in result.runs}


def test_an_entry_may_set_every_key_but_those_of_all_runs():
    assert set(OWN_SETTINGS) == Experiment.model_fields.keys() - SHARED


@pytest.mark.parametrize(
    ("text", "entry", "alone"),
    [
        ("algorithm.lr=0.01,0.1", "fbn lr=0.1", {"algorithm": RATE}),
        ("lr=0.01,0.1", "fbn lr=0.1", {"algorithm": RATE}),
        ("partition=gamma=0,iid", "fbn, iid", {"partition": "iid"}),
        ("clients=4,5", "fbn clients=5", {"clients": 5}),
        ("model.hidden=[8],[4]", "fbn hidden=[4]", {"model": {"name": "mlp", "hidden": [4]}}),
        ("algorithm=dsgd,fedavg", "fbn, fedavg", {"algorithm": FEDAVG}),
        ("rounds=1,2", "fbn rounds=2", {"rounds": 2}),
        ("dtype=float32,float64", "fbn, float64", {"dtype": "float64"}),
    ],
)  # fmt: skip
def test_a_swept_run_is_the_run_with_that_setting(text, entry, alone):
    swept = expand_sweep({**TINY, "strategies": ["fbn"]}, text)
    found = losses(fednorm.compare(**swept))
    (expected,) = losses(fednorm.compare(["fbn"], **{**TINY, **alone})).values()
    assert len(found) == 2
    assert found[entry] == expected


def test_a_learning_rate_of_one_strategy():
    entries = [
        "naive",
        {"name": "fbn", "lr": 0.2},
        {"name": "centralized", "algorithm": {"lr": 0.3}},
    ]
    experiment = build_experiment({**TINY, "strategies": entries, "byzantine": 1})
    rates = [experiment.for_entry(e).make_algorithm().lr for e in experiment.strategies]
    assert rates == [0.05, 0.2, 0.3]
    assert experiment.for_entry(experiment.strategies[2]).byzantine == 0


def test_sweeps_of_a_table_are_those_of_the_option():
    tabled = build_experiment(
        {
            "strategies": ["fbn", "gn"],
            "sweep": {"algorithm": {"lr": [0.1, 1.0]}, "partition": ["iid"]},
        }
    )
    values = expand_sweep({"strategies": ["fbn", "gn"]}, "algorithm.lr=0.1,1.0")
    assert tabled == build_experiment(expand_sweep(values, "partition=iid"))
    assert [e.title for e in tabled.strategies][:2] == ["fbn lr=0.1, iid", "fbn lr=1.0, iid"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "--sweep takes KEY=VALUE"),
        ("lr=", "--sweep takes KEY=VALUE"),
        ("=1,2", "--sweep takes KEY=VALUE"),
        ("lr=0.1,", "--sweep takes KEY=VALUE"),
        ("seeds=1,2", "the same for all runs"),
        ("device=cpu,cuda", "the same for all runs"),
        ("partitoin=iid,gamma=0", "partition"),
        ("algorithm.lr=0.1,fast", "lr"),
        ("algorithm.lrr=0.1,0.2", "lrr"),
        ("partition=iid,iit", "iit"),
        ("clients=0,3", "clients"),
        ("algorithm.lr=0.1,0.1", "listed twice"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(expand_sweep({"strategies": ["fbn"]}, text))


def test_sensitivity_is_drawn_by_each_key():
    swept = fednorm.compare(
        ["fbn", "gn"], **TINY, sweep={"algorithm.lr": [0.1, 0.02], "partition": ["iid", "gamma=0"]}
    )
    by_rate, by_partition = collect_sensitivity(swept)
    assert (by_rate.axis, by_rate.ticks) == ("lr", ("0.02", "0.1"))
    assert set(by_rate.lines) == {
        f"{name} partition={part}" for name in ("fbn", "gn") for part in ("iid", "gamma=0")
    }
    finals = {run.strategy: 100 * run.final.accuracy for run in swept.runs}
    assert by_rate.lines["gn partition=iid"].mean == (
        finals["gn lr=0.02, iid"],
        finals["gn lr=0.1, iid"],
    )
    assert by_partition.ticks == ("gamma=0", "iid")
    assert not list(
        collect_sensitivity(fednorm.compare(["fbn", {"name": "gn", "lr": 0.1}], **TINY))
    )


@pytest.mark.slow
def test_a_grid_runs_in_processes_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--strategies", "fbn", "--seeds", "1", "--clients", "3", "--rounds", "2"]
    words += ["--sweep", "lr=0.1,0.2", "--sweep", "partition=gamma=0,iid", "--workers", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    folder = tmp_path / "results" / "latest"
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/run.json")}
    assert len(stamps) == 4
    next(iter(stamps)).unlink()
    assert CliRunner().invoke(app, words).exit_code == 0
    made = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp]
    assert len(made) == 1
    assert len(json.loads((folder / "results.json").read_text())["runs"]) == 4
    assert "Sensitivity: accuracy on test data by lr" in (folder / "report.html").read_text()
