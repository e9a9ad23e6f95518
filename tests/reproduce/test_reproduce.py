"""Scales, what they cut, and a figure of one's own from file to report."""

import json
import sys
from contextlib import contextmanager

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.specs import merge_tables
from fednorm.reproduce.figure import describe_cuts, find_figure, scale_figure
from fednorm.reproduce.run_figure import FigureRequest, reproduce

OWN = """
title = "Mine, Figure 1"
question = "Does it work?"
source = "Author, 2026"
note = "Assumed: everything."
finals = "γ"
curves = ["γ = 1"]

[experiment]
strategies = ["centralized", "naive", "gn"]
rounds = 40
batch_size = 8
seeds = [0]
data = "digits"

[short]
rounds = 4
strategies = ["centralized", "naive"]
panels = ["γ = 0", "γ = 1"]
data = { test = 50 }

[[panels]]
title = "γ = 0"
set = { partition = "gamma=0" }
published = { centralized = 90.0, naive = 10.0 }
published_exchanges = { naive = 1 }

[[panels]]
title = "γ = 0.5"
set = { partition = "gamma=0.5" }

[[panels]]
title = "γ = 1"
set = { partition = "gamma=1" }
short = { rounds = 3 }
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


@contextmanager
def seen(events, title):
    yield Monitor([lambda event: events.append((title, event.strategy, event.round))])


def test_scales(own):
    figure = find_figure(own)
    assert [e.rounds for _, e in scale_figure(figure, "full")] == [40, 40, 40]
    short = scale_figure(figure, "short")
    assert [(p.title, e.rounds, e.partition) for p, e in short] == [
        ("γ = 0", 4, "gamma=0"),
        ("γ = 1", 3, "gamma=1"),
    ]
    assert short[0][1].data.fields == {"test": 50}
    smoke = scale_figure(figure, "smoke")
    assert [p.title for p, _ in smoke] == ["γ = 0", "γ = 1"]
    assert all((e.rounds, e.seeds, e.clients, e.batch_size) == (2, [0], 5, 4) for _, e in smoke)


def test_cuts_are_described(own):
    figure = find_figure(own)
    assert describe_cuts(figure, "full") == ("Assumed: everything.",)
    assert describe_cuts(figure, "short") == (
        "Without gn.",
        "γ = 0: rounds = 4 instead of 40.",
        "data.test = 50 instead of all.",
        "γ = 1: rounds = 3 instead of 40.",
        "Left out: γ = 0.5.",
        "Assumed: everything.",
    )


def test_user_settings_are_described(own):
    figure = find_figure(own)
    assert "rounds = 7 instead of 40." in describe_cuts(figure, "full", ["rounds=7"])
    assert {e.rounds for _, e in scale_figure(figure, "full", ["rounds=7"])} == {7}


def test_panels_of_the_users_choice(own):
    figure = find_figure(own)
    for scale in ("full", "short", "smoke"):
        chosen = scale_figure(figure, scale, ["rounds=7"], ["γ = 0.5"])
        assert [(p.title, e.rounds) for p, e in chosen] == [("γ = 0.5", 7)]
    assert "Left out: γ = 0, γ = 1." in describe_cuts(figure, "full", [], ["γ = 0.5"])
    with pytest.raises(
        UnknownNameError, match=r"unknown panel 'γ = O'.*'γ = 0'.*Known: γ = 0, γ = 0\.5"
    ):
        scale_figure(figure, "full", titles=["γ = O"])


def partitions(name, *settings):
    return [e.partition for _, e in scale_figure(find_figure(name), "full", settings)]


def test_a_partition_named_alone_keeps_the_value_of_every_panel():
    values = ["0.1", "0.3", "1", "10"]
    assert partitions("fbn-fig5") == ["gamma=0", *(f"dirichlet={v}" for v in values)]
    # γ = 0 is no value of α: that panel stays as it is.
    unbalanced = ["gamma=0", *(f"dirichlet_unbalanced={v}" for v in values)]
    assert partitions("fbn-fig5", "partition=dirichlet_unbalanced") == unbalanced
    for name in ("fbn-fig12", "fbn-fig13"):
        renamed = partitions(name, "partition=dirichlet_unbalanced")
        assert renamed == ["dirichlet_unbalanced=0.1"] * 3 + ["dirichlet_unbalanced=1"] * 3
    short = scale_figure(find_figure("fbn-fig5"), "short", ["partition=dirichlet_unbalanced"])
    assert [e.partition for _, e in short] == unbalanced[:2]
    said = describe_cuts(find_figure("fbn-fig5"), "full", ["partition=dirichlet_unbalanced"])
    assert "α = 1: partition = dirichlet_unbalanced=1 instead of dirichlet=1." in said


def test_a_partition_that_needs_no_value_replaces_every_panels():
    assert set(partitions("fbn-fig5", "partition=dirichlet=0.5")) == {"dirichlet=0.5"}
    assert set(partitions("fbn-fig5", "partition=iid")) == {"iid"}
    assert set(partitions("fbn-fig5", "partition=feature_shift")) == {"feature_shift"}


def test_a_partition_whose_value_no_panel_has_is_refused():
    with pytest.raises(ConfigError, match=r"needs a number for alpha.*'dirichlet_unbalanced=0.5'"):
        partitions("fbn-fig3", "partition=dirichlet_unbalanced")
    with pytest.raises(ConfigError, match="did you mean 'dirichlet_unbalanced'"):
        partitions("fbn-fig5", "partition=dirichlet_unbalancd")


@pytest.mark.parametrize("name", ["fbn-fig5", "fbn-fig12", "fbn-fig13"])
def test_the_dirichlet_figures_say_which_partition_they_use_and_how_to_choose_the_other(name):
    note = find_figure(name).note
    assert "equal size" in note
    assert "--partition dirichlet_unbalanced" in note


def test_the_evaluation_interval_is_not_a_cut(own):
    assert describe_cuts(find_figure(own), "full", ["eval_every=3"]) == ("Assumed: everything.",)


def test_the_number_of_threads_is_not_a_cut(own):
    assert describe_cuts(find_figure(own), "full", ["threads=2"]) == ("Assumed: everything.",)


def test_tables_are_merged_key_by_key():
    before = {"data": "digits", "algorithm": {"name": "dsgd", "lr": 0.1}}
    after = merge_tables(before, {"data": {"test": 9}, "algorithm": {"lr": 0.2}, "rounds": 3})
    assert after == {
        "data": {"name": "digits", "test": 9},
        "algorithm": {"name": "dsgd", "lr": 0.2},
        "rounds": 3,
    }
    assert before["algorithm"]["lr"] == 0.1


@pytest.mark.slow
def test_finished_parts_are_not_repeated(own, tmp_path):
    events = []

    def run():
        events.clear()
        request = FigureRequest(own, "short")
        *_, result = reproduce(request, tmp_path / "out", shown=lambda t, _: seen(events, t))
        return result

    first = run()
    assert ("γ = 0", "naive", 2) in events
    again = run()
    assert events == []
    for path in (tmp_path / "out" / "γ_=_1" / "runs" / "naive-seed0").glob("*.*"):
        path.unlink()
    third = run()
    assert ("γ = 1", "naive", 1) in events
    assert ("γ = 0", "naive", 1) not in events
    for result in (again, third):
        for one, other in zip(first.panels, result.panels, strict=True):
            assert [r.history for r in one.comparison.runs] == [
                r.history for r in other.comparison.runs
            ]


def test_standard_deviations_are_read_with_the_means(tmp_path):
    path = tmp_path / "mine.toml"
    means = "published = { centralized = 90.0, naive = 10.0 }"
    path.write_text(OWN.replace(means, f"{means}\npublished_std = {{ naive = 2.5 }}"), "utf-8")
    request = FigureRequest(str(path), "short", ["rounds=1"])
    first = next(reproduce(request, tmp_path / "out", shown=lambda t, _: seen([], t))).panels[0]
    assert first.published_std == {"naive": 2.5}
    smoke = FigureRequest(str(path), "smoke")
    made_up = next(reproduce(smoke, tmp_path / "smoke", shown=lambda t, _: seen([], t)))
    assert not made_up.panels[0].published_std


@pytest.mark.parametrize(
    ("std", "message"),
    [
        (
            "GN = 2.5",
            r"mine.toml: panels.0: 'GN' has a published standard deviation but no published mean",
        ),
        ("naive = -1.0", r"panels.0.published_std.naive: .* greater than or equal to 0"),
    ],
)
def test_standard_deviations_need_means(tmp_path, std, message):
    path = tmp_path / "mine.toml"
    means = "published = { centralized = 90.0, naive = 10.0 }"
    path.write_text(OWN.replace(means, f"{means}\npublished_std = {{ {std} }}"), "utf-8")
    with pytest.raises(ConfigError, match=message):
        find_figure(str(path))


def test_mistakes_in_a_file_are_named(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(OWN.replace("question", "qestion"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad.toml: qestion: extra inputs"):
        find_figure(str(path))
    path.write_text(OWN.replace('panels = ["γ = 0",', 'panels = ["γ = 2",'), encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r"unknown panel 'γ = 2'; did you mean"):
        scale_figure(find_figure(str(path)), "short")
    with pytest.raises(UnknownNameError, match="did you mean 'fbn-fig3'"):
        find_figure("fbn-fig33")


def call(*arguments):
    return CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_writes_a_report(own, tmp_path):
    out = tmp_path / "out"
    result = call(own, "--out", str(out), "--workers", "1")
    assert result.exit_code == 0
    assert "published" in result.output
    assert "data.test = 50 instead of all." in result.output
    record = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [panel["title"] for panel in record["panels"]] == ["γ = 0", "γ = 1"]
    assert record["panels"][0]["published"] == {"centralized": 90.0, "naive": 10.0}
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "Final accuracy by γ" in html
    assert "Exchanges per round" in html
    assert (out / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_command_takes_another_partition_by_its_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace('"gamma=', '"dirichlet=').replace('=0"', '=0.3"'), "utf-8")
    out = tmp_path / "out"
    chosen = ("--partition", "dirichlet_unbalanced", "--set", "rounds=2")
    assert call(str(path), "--out", str(out), "--workers", "1", *chosen).exit_code == 0
    record = json.loads((out / "results.json").read_text(encoding="utf-8"))
    used = [panel["config"]["partition"] for panel in record["panels"]]
    assert used == ["dirichlet_unbalanced=0.3", "dirichlet_unbalanced=1"]
    assert "--set partition=dirichlet_unbalanced" in record["command"]


@pytest.mark.slow
def test_a_length_and_panels_of_the_users_choice_are_on_the_page(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = ("--rounds", "2", "--panel", "γ = 0.5", "--scale", "full", "--workers", "1")
    assert call(own, *chosen).exit_code == 0
    [folder] = (p for p in (tmp_path / "results").iterdir() if not p.is_symlink())
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert record["command"].endswith("--scale full --panel 'γ = 0.5' --set rounds=2")
    assert [panel["config"]["rounds"] for panel in record["panels"]] == [2]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "rounds = 2 instead of 40." in page
    assert "Left out: γ = 0, γ = 1." in page


def test_the_list_shows_all(monkeypatch):
    command = sys.modules["fednorm.cli.reproduce"]
    monkeypatch.setattr(command, "console", Console(width=200))
    text = call("--list").output
    assert "fixbn-tableI" in text
    assert "FBN, Figure 4" in text


@pytest.mark.parametrize("option", ["--set=lr=0.1", "--panel=a", "--partition=iid"])
def test_options_of_runs_are_refused_where_nothing_is_trained(option, tmp_path):
    with pytest.raises(ConfigError, match="fbn-fig2 trains nothing; it takes --rounds and --out"):
        call("fbn-fig2", option, "--out", str(tmp_path))


@pytest.mark.slow
def test_the_ring_figures_are_drawn_by_ring(tmp_path):
    assert call("fbn-fig2", "--rounds", "3", "--out", str(tmp_path)).exit_code == 0
    assert (tmp_path / "figure2.png").exists()
    assert json.loads((tmp_path / "ring.json").read_text())["setting"]["rounds"] == 3


def test_unavailable_data_are_reported_before_the_first_run(tmp_path):
    """The second panel's data are missing; nothing is run for hours to find that out."""
    path = tmp_path / "two.toml"
    last = 'set = { partition = "gamma=1" }'
    other = 'set = { data = { name = "folder", root = "nowhere" } }'
    path.write_text(
        OWN.replace("data = { test = 50 }\n", "").replace(last, other), encoding="utf-8"
    )
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["reproduce", str(path), "--out", str(out)])
    assert isinstance(result.exception, OSError | ConfigError)
    assert "nowhere" in str(result.exception)
    assert not out.exists()


def test_a_smoke_run_is_not_compared_with_published_numbers(own, tmp_path):
    request = FigureRequest(own, "smoke")
    *_, result = reproduce(request, tmp_path, shown=lambda t, _: seen([], t))
    assert all(not panel.published for panel in result.panels)


@pytest.mark.slow
def test_ctrl_c_leaves_a_report_of_what_was_done(own, tmp_path):
    @contextmanager
    def stopping(title, experiment):
        del experiment

        def on_round(event):
            if title == "γ = 1" and event.round == 2:
                raise KeyboardInterrupt

        yield Monitor([on_round])

    results = list(reproduce(FigureRequest(own, "short"), tmp_path, shown=stopping))
    assert [len(result.panels) for result in results] == [1, 2]
    assert results[-1].panels[1].comparison.runs[0].status == "interrupted"
