"""Folders that experiments find by themselves."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.experiment.run_folder import choose_folder, link_latest, name_folder, open_folder
from fednorm.experiment.schema.load import build_experiment

QUICK = ["--strategies", "fbn", "--seeds", "1", "--clients", "3", "--workers", "1"]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "compare"),
        ({"strategies": ["fbn"], "seeds": [5], "timeout": 3}, "compare"),
        ({"partition": "dirichlet=0.1", "clients": 20}, "compare-dirichlet=0.1-clients=20"),
        ({"algorithm": {"name": "dsgd", "lr": 0.1, "momentum": 0.9}}, "compare-lr=0.1"),
        (
            {"data": {"name": "patterns", "size": 16}, "model": "cnn"},
            "compare-patterns-size=16-cnn",
        ),
        (
            {"byzantine": 3, "aggregator": "nnm > median"},
            "compare-byzantine=3-aggregator=nnm_median",
        ),
    ],
)
def test_a_name_tells_what_differs_from_the_defaults(values, name, tmp_path):
    assert choose_folder(build_experiment(values), root=tmp_path) == tmp_path / name


def test_experiments_of_one_name_have_a_folder_each(tmp_path):
    # Without momentum nothing is named that differs.
    first, second = (
        build_experiment({"algorithm": {"name": "dsgd", "lr": 0.1, **more}})
        for more in ({"momentum": 0.9}, {})
    )
    names = []
    for experiment in (first, second, first, second):
        names.append(choose_folder(experiment, root=tmp_path))
        open_folder(names[-1], experiment)
    assert [path.name for path in names] == ["compare-lr=0.1", "compare-lr=0.1-2"] * 2


def test_a_config_that_cannot_be_read_is_left_alone(tmp_path):
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "config.toml").write_text("a_key_of_the_future = 1")
    assert choose_folder(build_experiment({}), root=tmp_path).name == "compare-2"


@pytest.mark.parametrize("text", ["", ".", "..", "/", "///", "../..", "_.._", "a/../../b"])
def test_a_text_names_a_folder_inside_another_one(text):
    assert Path("results", name_folder(text)).resolve().parent == Path("results").resolve()


def test_latest_leads_to_the_last_folder_and_replaces_no_folder(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name, tmp_path)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    link_latest(tmp_path / "latest", tmp_path)  # as --out; it would lead to itself
    assert (tmp_path / "latest").resolve() == tmp_path / "two"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    link_latest(tmp_path / "one", tmp_path)
    assert not (tmp_path / "latest").is_symlink()


@pytest.mark.slow
def test_no_second_command_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("rounds = 2\n")
    commands = {
        "compare-clients=3-rounds=2": ["compare", "--set", "rounds=2", *QUICK],
        "compare-clients=3-rounds=1": ["compare", "--set", "rounds=1", *QUICK],
        "mine-clients=3": ["compare", "--config", "mine.toml", *QUICK],
        "compare-clients=3-rounds=1-threads=2": [
            "run", "results/compare-clients=3-rounds=1/config.toml", "--set", "threads=2",
            "--workers", "1",
        ],
    }  # fmt: skip
    for name, words in commands.items():
        for _ in range(2):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
            assert (tmp_path / "results" / "latest").resolve().name == name
    assert {path.name for path in (tmp_path / "results").iterdir()} == {*commands, "latest"}
    page = tmp_path / "results" / "latest" / "results.json"
    assert json.loads(page.read_text())["config"]["threads"] == 2
