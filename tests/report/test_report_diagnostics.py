"""Diagnostics on the page."""

import re

import pytest

from fednorm.report.colors import KNOWN
from fednorm.report.diagnostics import diagnostics_svg, explanation
from fednorm.report.page import page
from report.report_cases import EDGE_CASES, NAN, comparison, run


def looked_at(strategy, count=20, seed=0, **constant):
    values = {"drift": 1.5, "deviation": 12.0, "gradient_deviation": None, **constant}
    return run(strategy, (0.5, 0.6), seed, diagnostics=tuple([values] * count))


@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_without_records_there_is_no_section(result):
    assert diagnostics_svg(result) == ""
    assert "Diagnostics" not in page(result)


def test_the_section_shows_what_was_recorded_in_the_strategies_colours():
    result = comparison(looked_at("fbn"), looked_at("naive"), run("gn", (0.5, 0.6)))
    html = page(result)
    assert html.count("<svg") == 2
    assert "<h2>Diagnostics</h2>" in html
    svg = diagnostics_svg(result)
    assert svg in html
    assert svg == diagnostics_svg(result)
    assert KNOWN["fbn"].color in svg
    assert KNOWN["naive"].color in svg
    assert KNOWN["gn"].color not in svg  # it has nothing to show
    assert ">drift<" in svg
    assert ">deviation<" in svg
    assert "gradient deviation" not in svg
    assert "Gradient deviation" not in explanation(result)
    assert "mathdefault" not in svg


def test_all_three_are_drawn_where_they_are_known():
    result = comparison(looked_at("fbn", gradient_deviation=0.3))
    assert ">gradient deviation<" in diagnostics_svg(result)
    assert "Gradient deviation" in explanation(result)


@pytest.mark.parametrize("nothing", [None, 0.0, NAN])
def test_what_a_logarithmic_plot_cannot_show_is_left_out(nothing):
    empty = comparison(looked_at("gn", drift=nothing, deviation=nothing))
    assert diagnostics_svg(empty) == ""
    mixed = comparison(looked_at("fbn"), looked_at("gn", drift=nothing, deviation=nothing))
    assert KNOWN["gn"].color not in diagnostics_svg(mixed)


def test_long_runs_are_thinned():
    short, long = (diagnostics_svg(comparison(looked_at("fbn", n))) for n in (150, 3000))
    assert len(long) < 1.2 * len(short)
    assert "mean over 20 rounds" in explanation(comparison(looked_at("fbn", 3000)))
    assert "mean over" not in explanation(comparison(looked_at("fbn", 150)))


def test_numbers_in_the_page_are_not_used_twice():
    html = page(comparison(looked_at("fbn")))
    groups = re.findall(r'<g id="([^"]+)"', html)
    assert len(groups) == len(set(groups))
    used = {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)}
    assert used <= set(re.findall(r'id="([^"]+)"', html))


def test_labels_are_escaped():
    html = page(comparison(looked_at("<script>x</script>")))
    assert "<script" not in html
