"""Diagnostics on the page."""

import re

import pytest

from fednorm.report.curves import (
    explain_diagnostics,
    list_diagnosed,
    render_diagnostics,
)
from fednorm.report.styles import KNOWN, choose_styles
from report.report_cases import EDGE_CASES, NAN, comparison, page, run


def looked_at(strategy, count=20, seed=0, **constant):
    values = {"drift": 1.5, "deviation": 12.0, "gradient_deviation": None, **constant}
    return run(strategy, (0.5, 0.6), seed, diagnostics=tuple([values] * count))


def drawn(result):
    looks = choose_styles(run.strategy for run in result.runs)
    return render_diagnostics(result, looks, "0")


@pytest.mark.slow
@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_without_records_there_is_no_section(result):
    assert drawn(result) == {}
    assert "Diagnostics" not in page(result)


@pytest.mark.slow
def test_the_section_shows_diagnostics_in_the_colors_of_strategies():
    result = comparison(looked_at("fbn"), looked_at("naive"), run("gn", (0.5, 0.6)))
    html = page(result)
    assert "<h2>Diagnostics</h2>" in html
    plots = drawn(result)
    assert list(plots) == ["drift", "deviation"]
    assert plots == drawn(result)
    assert list_diagnosed(result) == {"fbn", "naive"}
    for svg in plots.values():
        assert svg in html
        assert KNOWN["fbn"].color in svg
        assert 'data-method="1"' in svg
        assert KNOWN["naive"].color in svg
        assert KNOWN["gn"].color not in svg  # it has nothing to show
        assert "mathdefault" not in svg
    legend = html.split("<h2>Diagnostics</h2>")[1].split("</ul>")[0]
    assert re.findall(r"<span>(\w+)</span>", legend) == ["fbn", "naive"]
    assert "Gradient deviation" not in explain_diagnostics(result)


def test_all_are_drawn_where_they_are_known():
    result = comparison(looked_at("fbn", gradient_deviation=0.3, statistics_variance=2.0))
    titles = ["drift", "deviation", "variance of statistics", "gradient deviation"]
    assert list(drawn(result)) == titles
    assert "over the last 200 rounds" in explain_diagnostics(result)
    assert "with the same dropout masks" in explain_diagnostics(result)


@pytest.mark.slow
@pytest.mark.parametrize("nothing", [None, 0.0, NAN])
def test_values_without_a_logarithm_are_left_out(nothing):
    empty = comparison(looked_at("gn", drift=nothing, deviation=nothing))
    assert drawn(empty) == {}
    mixed = comparison(looked_at("fbn"), looked_at("gn", drift=nothing, deviation=nothing))
    assert all(KNOWN["gn"].color not in svg for svg in drawn(mixed).values())


@pytest.mark.slow
def test_long_runs_are_thinned():
    short, long = (drawn(comparison(looked_at("fbn", n)))["drift"] for n in (150, 3000))
    assert len(long) < 1.2 * len(short)
    assert "mean over 20 rounds" in explain_diagnostics(comparison(looked_at("fbn", 3000)))
    assert "mean over" not in explain_diagnostics(comparison(looked_at("fbn", 150)))


def test_numbers_in_the_page_are_not_used_twice():
    html = page(comparison(looked_at("fbn"), looked_at("gn")))
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) == len(set(names)) > 2
    used = {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)}
    assert used <= set(re.findall(r'id="([^"]+)"', html))


def test_labels_are_escaped():
    html = page(comparison(looked_at("<script>x</script>")))
    assert "<script>x" not in html
    assert "&lt;script&gt;x" in html
