"""A figure: its folder, its page, and its table in the terminal."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from fednorm.experiment.results import PanelResult
from fednorm.report.heatmaps import collect_gap_maps
from fednorm.report.series import collect_plots
from fednorm.report.tables import build_figure_table
from fednorm.report.write import write_figure
from report.report_cases import (
    CONFIG,
    NAN,
    Elements,
    comparison,
    page,
    run,
    three_strategies,
    told,
    two_panels,
)


def written(figure, folder):
    write_figure(figure, folder)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def printed(figure):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(build_figure_table(figure))
    return capture.get()


@pytest.mark.slow
def test_a_story_leaves_three_files(tmp_path):
    report = write_figure(two_panels(), tmp_path / "new")
    names = {path.name for path in report.parent.iterdir()}
    assert names == {"results.json", "curves.png", "report.html"}
    png = (report.parent / "curves.png").read_bytes()
    assert report.read_text(encoding="utf-8") == page(two_panels(), png)


@pytest.mark.slow
def test_results_json_tells_the_story(tmp_path):
    record = written(two_panels(), tmp_path)
    panels = record.pop("panels")
    assert record == {
        "schema": 1,
        "title": "FBN, Figure 3a",
        "question": "Does it keep up?",
        "source": "FBN, 2024, arXiv:2405.14670",
        "command": "fednorm reproduce fbn-3a",
        "cuts": ["A small network."],
    }
    assert [panel["title"] for panel in panels] == ["γ = 0", "γ = 0.01"]
    assert panels[0]["published"] == {"centralized": 91.0, "fbn": 90.0, "naive": 10.0}
    assert panels[0]["agreement"]["statement"] == "Same order of methods as published."
    assert panels[1]["config"] == {**CONFIG, "rounds": 30}
    assert panels[1]["runs"][1]["final"]["accuracy"] == 0.7


@pytest.mark.slow
def test_a_panel_without_published_numbers_has_no_agreement(tmp_path):
    figure = told(PanelResult("", three_strategies()))
    assert written(figure, tmp_path)["panels"][0]["agreement"] is None
    assert "published and measured" not in page(figure)
    assert "published" not in page(figure).split("<main>")[1].split("</main>")[0].lower().replace(
        "published in: fbn", ""
    )
    assert "order" not in printed(figure)
    assert "81.0 ± 1.4" in printed(figure)


@pytest.mark.slow
def test_published_numbers_that_are_not_finite_become_null(tmp_path):
    figure = told(PanelResult("", three_strategies(), {"fbn": NAN, "naive": 10.0}))
    assert written(figure, tmp_path)["panels"][0]["published"] == {"fbn": None, "naive": 10.0}


@pytest.mark.slow
def test_the_page_tells_the_story_in_order():
    html = page(two_panels())
    told_in_order = [
        "<title>Does it keep up? – FBN, Figure 3a</title>",
        '<p class="title">FBN, Figure 3a</p>',
        "<h1>Does it keep up?</h1>",
        "Published in: FBN, 2024, arXiv:2405.14670",
        "<b>γ = 0</b> naive loses 80\u00a0points; fbn wins back 70\u00a0points.",
        "<em>Same order of methods as published.</em>",
        "<b>γ = 0.01</b> naive diverges; fbn ends highest with 85.0\u00a0%",
        "γ = 0.01: naive diverged.",
        "<h2>What was cut</h2>",
        "<li>A small network.</li>",
        "<h2>Accuracy by round</h2>",
        '<div class="plot" data-panel="0">',
        '<div class="plot" data-panel="1">',
        "Dashes at the right are published numbers.",
        "<h2>Accuracy, published and measured</h2>",
        "<h2>Results</h2>",
        "<h2>Failures</h2>",
        "<strong>naive</strong>, γ = 0.01, seed 0: diverged",
        "<code>fednorm reproduce fbn-3a</code>",
        "<dt>partition.alpha</dt><dd><code>0.1</code></dd>",
        "<h4>γ = 0</h4>",
        "<dt>rounds</dt><dd><code>20</code></dd>",
        "<h4>γ = 0.01</h4>",
        "<dt>rounds</dt><dd><code>30</code></dd>",
    ]
    places = [html.find(part) for part in told_in_order]
    assert -1 not in places
    assert places == sorted(places)
    assert html.count("<dt>partition.alpha</dt>") == 1  # what panels share stands there once


def test_a_sentence_true_of_all_panels_appears_once():
    html = page(told(*two_panels().panels))
    assert html.count("With one seed, small differences may be chance.") == 1


def test_without_cuts_there_is_no_section_about_them():
    assert "What was cut" not in page(told(*two_panels().panels, cuts=()))


@pytest.mark.slow
def test_final_values_are_plotted_against_the_varied_parameter():
    figure = replace(two_panels(), finals="γ", curves=("γ = 0.01",))
    drawn = collect_plots(figure)
    assert drawn.finals.ticks == ("0", "0.01")
    assert drawn.finals.lines["fbn"].rounds == (0, 1)
    assert drawn.finals.lines["fbn"].mean == pytest.approx((80.0, 85.0))
    assert drawn.finals.published["centralized"] == ((0, 91.0),)
    assert [plot.title for plot in drawn.panels] == ["γ = 0.01"]
    html = page(figure)
    assert "Final accuracy by γ" in html
    assert html.count('data-panel="') == 1
    assert "centralized" in html.split("published and measured</h2>")[1]  # tables show all panels


def test_exchanges_are_shown_next_to_published_ones():
    first, *_ = two_panels().panels
    figure = told(replace(first, published={}, published_exchanges={"fbn": 58.0}))
    table = page(figure).split("Exchanges per round, published and measured</h2>")[1]
    cells = Elements(table.split("<tbody>")[1].split("</tbody>")[0]).cells
    counted = [str(round(r.exchanges_per_round)) for r in first.comparison.runs]
    assert cells[:6] == ["centralized", "–", counted[0], "fbn", "58", counted[1]]


def test_published_and_measured_stand_side_by_side_on_the_page():
    table = page(two_panels()).split("published and measured</h2>")[1].split("<tbody>")[1]
    cells = Elements(table.split("</tbody>")[0]).cells
    assert cells[:5] == ["centralized", "91.0", "90.0", "−1.0", "1"]
    assert 'data-value="-1.0"' in table


@pytest.mark.slow
def test_published_standard_deviations_are_shown_with_the_means(tmp_path):
    first, second = two_panels().panels
    figure = told(replace(first, published_std={"fbn": 1.25}), second)
    table = page(figure).split("published and measured</h2>")[1].split("<tbody>")[1]
    cells = Elements(table.split("</tbody>")[0]).cells
    assert cells[5:10] == ["fbn", "90.0 ± 1.2", "80.0", "−10.0", "1"]
    assert cells[:2] == ["centralized", "91.0"]
    assert ["fbn", "90.0", "±", "1.2", "80.0", "−10.0", "1"] in [
        line.split() for line in printed(figure).splitlines()
    ]
    panels = written(figure, tmp_path)["panels"]
    assert [panel["published_std"] for panel in panels] == [{"fbn": 1.25}, {}]
    assert panels[0]["agreement"]["rows"][1]["published_std"] == 1.25


def test_a_published_standard_deviation_that_is_not_finite_is_not_shown():
    first, _ = two_panels().panels
    shown = printed(told(replace(first, published_std={"fbn": NAN})))
    assert ["fbn", "90.0", "80.0", "−10.0", "1"] in [line.split() for line in shown.splitlines()]


def test_the_terminal_shows_published_measured_and_gap():
    shown = printed(two_panels())
    lines = [line.split() for line in shown.splitlines()]
    assert ["γ", "=", "0:", "accuracy,", "published", "and", "measured"] in lines
    assert ["fbn", "90.0", "80.0", "−10.0", "1"] in lines
    assert ["gn", "75.5", "70.0", "−5.5", "1"] in lines
    assert ["naive", "–", "–", "–", "1"] in lines  # diverged: no result
    assert shown.count("Same order of methods as published.") == 2


@pytest.mark.parametrize("label", ["[red]x", "a label that is much too long " * 4])
def test_the_terminal_keeps_numbers_whole_and_labels_literal(label):
    figure = told(PanelResult("[b]", comparison(run(label, (0.8123,))), {label: 85.25}))
    shown = printed(figure)
    assert all(text in shown for text in ("85.2", "81.2", "−4.0", "[b]", label.split()[0]))


def test_heat_maps_put_panels_into_cells():
    cells = {"LeNet, iid, E = 1": (0.5, 0.4), "LeNet, iid, E = 9": (0.2, 0.6)}
    panels = [
        PanelResult(title, comparison(run("gn", (a,)), run("naive", (b,))))
        for title, (a, b) in cells.items()
    ]
    panels.append(PanelResult("LeNet, shards, E = 1", comparison(run("gn", (0.5,)))))
    figure = replace(told(*panels), heat=("gn", "naive"), curves=())
    (only,) = collect_gap_maps(figure)
    assert (only.title, only.rows, only.columns) == ("LeNet", ("iid", "shards"), ("E = 1", "E = 9"))
    assert only.cells == pytest.approx({("iid", "E = 1"): 10.0, ("iid", "E = 9"): -40.0})
    html = page(figure)
    assert "gn against naive" in html
    sentence = "gn ends above naive in 1 of 2 settings; the gap ranges from −40.0 to +10.0 points."
    assert sentence in html
    assert ">+10.0<" in html
    assert "<image" not in html  # the page's policy refuses images
    assert "Accuracy by round" not in html


def test_heat_maps_replace_the_curves_in_the_png(tmp_path):
    figure = replace(two_panels(), heat=("fbn", "naive"), curves=())
    written(figure, tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 3000
