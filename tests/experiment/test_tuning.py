"""Each strategy at its best settings, chosen on validation data."""

import json

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import hold_out, make_validation
from fednorm.experiment.schema.load import build_experiment, read_toml
from fednorm.report.tables import fill_rows

TINY = {"rounds": 8, "clients": 3, "seeds": [0, 1]}
RATES = [0.3, 0.0001, 0.05]


def test_the_choice_is_that_of_runs_on_held_out_data():
    tuned = fednorm.compare(["gn", "centralized"], tune={"lr": RATES}, **TINY)
    # The same by hand, without `tune`.
    held = {"name": "fednorm.experiment.comparison:hold_out", "of": {"name": "digits"}}
    expected = {}
    for name in ("gn", "centralized"):
        found = {
            rate: fednorm.compare(
                [name], data=held, algorithm={"name": "dsgd", "lr": rate, "momentum": 0.9},
                **{**TINY, "seeds": [0]},
            ).runs[0].final.accuracy
            for rate in RATES
        }  # fmt: skip
        expected[name] = max(found, key=found.get)
    assert tuned.chosen == {name: {"lr": rate} for name, rate in expected.items()}
    assert len(set(expected.values()) | {0.0001}) > len(set(expected.values()))  # it is no choice
    assert len(tuned.validation.runs) == 2 * len(RATES)
    assert {run.tested for run in tuned.validation.runs} == {
        len(hold_out({"name": "digits"}, 0).y_test)
    }
    for run in tuned.runs:
        algorithm = {"name": "dsgd", "lr": expected[run.strategy], "momentum": 0.9}
        (plain,) = fednorm.compare(
            [run.strategy], algorithm=algorithm, **{**TINY, "seeds": [run.seed]}
        ).runs
        assert run.final == plain.final


def test_fields_of_strategies_and_several_keys():
    tune = {"strategy.stats_momentum": [0.1, 0.5], "batch_size": [10, 20]}
    experiment = build_experiment({"strategies": ["fbn", "gn"], "tune": tune})
    titles = [entry.title for entry in make_validation(experiment).strategies]
    assert titles == [
        *(f"fbn stats_momentum={m} batch_size={b}" for m in (0.1, 0.5) for b in (10, 20)),
        *(f"gn batch_size={b}" for b in (10, 20)),
    ]


def test_data_of_one_strategy_are_held_out_too():
    entry = {"name": "fbn", "data": {"test": 100}}
    experiment = build_experiment({"strategies": [entry], "tune": {"lr": [0.1, 0.2]}})
    validation = make_validation(experiment)
    for candidate in validation.strategies:
        data = validation.for_entry(candidate).data
        assert data.name == "fednorm.experiment.comparison:hold_out"
        assert data.fields["of"] == {"name": "digits", "test": 100}


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"lr": 0.1}, "tune"),
        ({"seeds": [1, 2]}, "same for all runs"),
        ({"lrr": [1]}, "lrr"),
        ([1], "lists of"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(tune, message):
    with pytest.raises(ConfigError, match=message):
        fednorm.compare(["fbn"], tune=tune, **TINY)


def test_a_diverged_run_is_never_chosen():
    found = fednorm.compare(["fbn"], tune={"lr": [1e25, 0.01]}, **TINY)
    assert found.chosen == {"fbn": {"lr": 0.01}}


@pytest.mark.slow
def test_the_command_shows_the_choice_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--strategies", "fbn,gn", "--seeds", "2", "--clients", "3", "--rounds", "4"]
    words += ["--tune", "lr=0.0001,0.1", "--workers", "2"]
    for _ in range(2):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        stamps = [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("results/*/**/run.json"))]
    (folder,) = {path.resolve() for path in (tmp_path / "results").iterdir()}
    assert len(list(folder.glob("**/run.json"))) == 4 + 4
    assert CliRunner().invoke(app, words).exit_code == 0
    again = [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("results/*/**/run.json"))]
    assert again == stamps
    record = json.loads((folder / "results.json").read_text())
    assert record["chosen"].keys() == {"fbn", "gn"}
    assert read_toml(folder / "config.toml")["tune"] == {"lr": [0.0001, 0.1]}
    page = (folder / "report.html").read_text()
    assert "Sensitivity: accuracy on validation data by lr" in page
    assert '<th scope="col" class="number">lr</th>' in page


def test_the_table_has_the_chosen_values():
    found = fednorm.compare(["fbn", "gn"], tune={"lr": [0.1, 0.2]}, **{**TINY, "rounds": 1})
    rows = fill_rows(found)
    assert [row["lr"] for row in rows] == [str(found.chosen[n]["lr"]) for n in ("fbn", "gn")]
    assert "lr" not in fill_rows(fednorm.compare(["fbn"], **{**TINY, "rounds": 1}))[0]


@pytest.mark.slow
def test_a_file_with_panels_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "panels.toml"
    path.write_text(
        'finals = "lr"\n[experiment]\nstrategies = ["fbn"]\nclients = 3\nrounds = 1\nseeds = 1\n'
        '[[panels]]\ntitle = "lr = 0.1"\nset = {algorithm = {name = "dsgd", lr = 0.1}}\n'
        '[[panels]]\ntitle = "lr = 0.2"\nset = {algorithm = {name = "dsgd", lr = 0.2}}\n'
    )
    for settings in ([], ["--set", "rounds=2"]):
        result = CliRunner().invoke(app, ["run", "panels.toml", "--workers", "1", *settings])
        assert result.exit_code == 0, result.output
    folder = tmp_path / "results" / "latest"
    assert folder.resolve().name == "panels-rounds=2"
    record = json.loads((folder / "results.json").read_text())
    assert [p["config"]["algorithm"]["lr"] for p in record["panels"]] == [0.1, 0.2]
    assert record["command"] == "fednorm run panels.toml --set rounds=2"
