"""Folders are read as they were written, and joined."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app
from fednorm.errors import ConfigError
from fednorm.report.join import join_folders, load_figure
from fednorm.report.tables import fill_rows
from fednorm.report.write import wrap_comparison, write_comparison, write_figure

TINY = {"rounds": 2, "clients": 3, "seeds": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make folders of experiments that differ in one thing each."""
    root = tmp_path_factory.mktemp("results")
    made = {
        "first": {"strategies": ["naive", "fbn"]},
        "gn": {"strategies": ["gn", {"name": "fbn", "stats_momentum": 0.5}]},
        "seeds": {"strategies": ["fbn"], "seeds": [2]},
        "iid": {"strategies": ["fbn"], "partition": "iid"},
        "tuned": {"strategies": ["fbn"], "tune": {"lr": [0.01, 0.1]}},
    }
    for name, settings in made.items():
        compared = fednorm.compare(**{**TINY, **settings}, out=root / name)
        text = json.dumps(compared.to_json())
        (root / name / "results.json").write_text(text)
    return root


def list_labels(comparison):
    return list(dict.fromkeys(run.strategy for run in comparison.runs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "tuned"])
def test_a_folder_is_read_as_it_was_written(folders, name):
    found = load_figure(folders / name).panels[0].comparison
    entries = {"first": ["naive", "fbn"], "tuned": ["fbn"]}[name]
    tune = {"tune": {"lr": [0.01, 0.1]}} if name == "tuned" else {}
    again = fednorm.compare(entries, **TINY, **tune, out=folders / name)  # runs are not repeated
    assert found.runs == again.runs
    assert found.config == again.config
    assert found.chosen == again.chosen
    assert found.label_counts == again.label_counts
    if name == "tuned":
        assert found.validation.runs == again.validation.runs


@pytest.mark.slow
def test_strategies_and_seeds_of_one_setting_share_a_panel(folders):
    figure = join_folders([folders / name for name in ("first", "gn", "seeds")])
    (panel,) = figure.panels
    assert (figure.title, panel.title) == ("", "")
    assert list_labels(panel.comparison) == ["naive", "fbn", "gn", "fbn (stats_momentum = 0.5)"]
    seeds = [run.seed for run in panel.comparison.runs if run.strategy == "fbn"]
    assert seeds == [0, 1, 2]
    assert panel.comparison.config["seeds"] == [0, 1, 2]
    notes = {row["strategy"]: row["note"] for row in fill_rows(panel.comparison)}
    assert notes == {
        "naive": "2 of 3 seeds", "fbn": "", "gn": "2 of 3 seeds",
        "fbn (stats_momentum = 0.5)": "2 of 3 seeds",
    }  # fmt: skip
    assert figure.command.startswith("fednorm report ")


@pytest.mark.slow
def test_other_settings_are_other_panels_unless_together(folders):
    pair = [folders / "first", folders / "iid"]
    figure = join_folders(pair)
    assert [panel.title for panel in figure.panels] == ["gamma=0", "iid"]
    assert (figure.title, figure.finals) == ("first + iid", "")
    (panel,) = join_folders(pair, together=True).panels
    assert list_labels(panel.comparison) == ["naive (gamma=0)", "fbn (gamma=0)", "fbn (iid)"]
    assert "partition" not in panel.comparison.config
    settings = {row["strategy"]: row["setting"] for row in panel.comparison.list_runs()}
    assert settings["fbn (iid)"] == '{"partition": "iid"}'
    assert r"\textbf" not in panel.comparison.to_latex()  # the best of different settings


@pytest.mark.slow
def test_unfinished_runs_are_named_and_left_out(folders, tmp_path):
    copy = shutil.copytree(folders / "first", tmp_path / "copy")
    (copy / "runs" / "fbn-seed1" / "run.json").unlink()
    found = load_figure(copy).panels[0].comparison
    assert found.missing == ("fbn seed 1",)
    assert len(found.runs) == 3
    page = write_comparison(found, tmp_path / "report").read_text()
    assert "1 run is not finished and left out: fbn seed 1." in page
    done = CliRunner().invoke(app, ["export", str(copy), "--format", "latex"])
    assert done.exit_code == 0
    assert "1 of 4 runs are not finished and left out: fbn seed 1" in done.stderr
    (joined,) = join_folders([copy, folders / "first"]).panels  # the other folder holds it
    assert (joined.comparison.missing, len(joined.comparison.runs)) == ((), 4)


@pytest.mark.slow
def test_panels_keep_their_titles_and_published_numbers(folders, tmp_path):
    figure = wrap_comparison(load_figure(folders / "first").panels[0].comparison)
    (panel,) = figure.panels
    shutil.copytree(folders / "first", tmp_path / "story" / "E_=_1")
    titled = type(panel)("E = 1", panel.comparison, {"fbn": 90.0}, best=True)
    story = type(figure)("Figure 1", "Why?", "fednorm reproduce x", (titled,), finals="E")
    write_figure(story, tmp_path / "story")
    assert load_figure(tmp_path / "story") == story
    joined = join_folders([tmp_path / "story", folders / "iid"])
    assert [panel.title for panel in joined.panels] == ["", "Figure 1: E = 1"]


@pytest.mark.slow
def test_the_commands_write_reports_and_files(folders, tmp_path):
    paths = [str(folders / name) for name in ("first", "gn")]
    done = CliRunner().invoke(app, ["report", *paths, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "fbn (stats_momentum = 0.5)" in (tmp_path / "report.html").read_text()
    arguments = ["--format", "csv,latex", "--against", "gn", "--out", str(tmp_path / "paper")]
    done = CliRunner().invoke(app, ["export", *paths, *arguments])
    assert {path.name for path in (tmp_path / "paper").iterdir()} == {
        "runs.csv", "strategies.csv", "table.tex",
    }  # fmt: skip
    assert r"$\Delta$ gn" in (tmp_path / "paper" / "table.tex").read_text()
    done = CliRunner().invoke(app, ["export", str(folders / "seeds"), "--format", "latex"])
    assert "with one seed there is neither a spread nor a p value" in done.stderr


def test_folders_that_hold_nothing_say_so(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        load_figure(tmp_path / "nowhere")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text('strategies = ["fbn"]\n')
    with pytest.raises(ConfigError, match=r"holds no experiment.*; there are experiments in .* a"):
        load_figure(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no finished run .*`fednorm run"):
        load_figure(tmp_path / "a")
    run = tmp_path / "a" / "runs" / "fbn-seed0"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds one run; name its experiment"):
        load_figure(run)


@pytest.mark.slow
def test_a_folder_is_named_once(folders):
    with pytest.raises(ConfigError, match="named twice"):
        join_folders([folders / "first", folders / "gn" / ".." / "first"])


@pytest.mark.slow
def test_a_joined_report_replaces_none(folders):
    paths = [str(folders / name) for name in ("first", "gn")]
    done = CliRunner().invoke(app, ["report", *paths, "--out", paths[0]])
    assert isinstance(done.exception, ConfigError)
    assert "holds an experiment with its own report" in str(done.exception)
