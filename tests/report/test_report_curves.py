"""The curves and their colours."""

import re
import struct
from dataclasses import replace
from importlib.resources import files

import pytest

from fednorm.report.curves import NARROW, WIDE, render_panel
from fednorm.report.series import average_accuracy, collect_plots, find_divergences
from fednorm.report.styles import KNOWN, OTHERS, choose_style, choose_styles
from fednorm.report.write import wrap_comparison, write_curves
from report.report_cases import (
    EDGE_CASES,
    NAN,
    comparison,
    diverged,
    page,
    run,
    three_strategies,
    told,
    two_panels,
)


def png_size(figure, path):
    with path.open("wb") as file:
        write_curves(figure, file)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert 2_000 < len(content) < 500_000
    return struct.unpack(">II", content[16:24])


def svgs(figure, size=NARROW):
    drawn = collect_plots(figure)
    return [render_panel(drawn, plot, size) for plot in drawn.panels]


def test_a_curve_covers_every_round_that_a_seed_has():
    runs = (run("fbn", (0.2, 0.4, NAN)), diverged("fbn", (0.4,), 1))
    line = average_accuracy(runs)
    assert line.rounds == (10, 20)
    assert line.mean == pytest.approx((30, 40))
    assert line.low == pytest.approx((20, 40))
    assert line.high == pytest.approx((40, 40))
    assert find_divergences(runs) == [(10, pytest.approx(40))]


@pytest.mark.slow
@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_the_png_is_a_png_of_a_plausible_size(result, tmp_path):
    width, height = png_size(wrap_comparison(result), tmp_path / "c.png")
    assert width == 1080
    assert 200 <= height <= 1200


@pytest.mark.slow
@pytest.mark.parametrize(("count", "columns", "rows"), [(2, 2, 1), (3, 3, 1), (4, 3, 2)])
def test_panels_stand_side_by_side_three_in_a_row(count, columns, rows, tmp_path):
    panels = (two_panels().panels * 2)[:count]
    width, height = png_size(told(*panels), tmp_path / "c.png")
    assert width == pytest.approx(150 * columns * NARROW[0], abs=1)
    assert 0 < height - 150 * rows * NARROW[1] < 150


def test_a_story_without_panels_or_runs_can_be_drawn(tmp_path):
    assert png_size(told(), tmp_path / "c.png")
    assert "Nothing to plot" in page(wrap_comparison(comparison()))
    assert "<h1>Nothing was run</h1>" in page(wrap_comparison(comparison()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_the_svg_is_the_same_every_time_and_shows_every_strategy(result, size):
    (svg,) = svgs(wrap_comparison(result), size)
    assert [svg] == svgs(wrap_comparison(result), size)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#010203" not in svg
    shown = [s.strategy for s in result.summaries() if s.accuracy is not None]
    numbers = {int(number) for number in re.findall(r'data-method="(\d+)"', svg)}
    labels = list(collect_plots(wrap_comparison(result)).styles)
    assert [labels[number] for number in sorted(numbers)] == shown
    assert ("Nothing to plot" in svg) is (not shown)
    assert ('class="area"' in svg) is bool(shown)


def test_the_svg_draws_lines_in_the_colors_of_the_strategies():
    (svg,) = svgs(wrap_comparison(three_strategies()))
    assert all(KNOWN[name].color in svg for name in ("centralized", "fbn", "naive"))
    assert KNOWN["gn"].color not in svg


def test_panels_share_scale_and_styles_but_not_rounds():
    drawn = collect_plots(two_panels())
    assert list(drawn.styles) == ["centralized", "fbn", "naive", "gn"]
    assert drawn.panels[0].x == pytest.approx((10 - 0.2, 20 + 0.2))
    assert drawn.y == pytest.approx((10 - 4.05, 91 + 4.05))  # the published 91.0 is in sight
    first, second = svgs(two_panels())
    ticks = [re.findall(r">(\d+)</text>", svg) for svg in (first, second)]
    assert ticks[0] == ticks[1] != []
    assert 'data-method="3"' in second
    assert 'data-method="3"' not in first


@pytest.mark.slow
def test_published_numbers_and_diverged_runs_are_marked():
    def count(panels, method):
        return svgs(told(*panels))[0].count(f'data-method="{method}"')

    first, second = two_panels().panels
    bare = replace(first, published={})
    assert count([first], 1) == count([bare], 1) + 1
    finished = tuple(replace(r, status="finished") for r in second.comparison.runs)
    well = replace(second, comparison=comparison(*finished))
    assert count([second], 2) == count([well], 2) + 1


def test_axes_name_the_metric():
    ious = comparison(run("fbn", (0.5, 0.6), metric="mean IoU"))
    html = page(ious)
    assert ">mean IoU (%)<" in svgs(wrap_comparison(ious))[0]
    assert "<h2>Mean IoU by round</h2>" in html
    assert "final mean IoU %" in html
    assert "Mean IoU: one seed." in html
    assert "ccuracy" not in html.split("<body>")[1].split("<script")[0]


def test_a_name_has_one_color_everywhere():
    assert (
        choose_style("fixbn auto")
        == choose_style("FixBN")
        == choose_style("fixbn:gn")
        == KNOWN["fixbn"]
    )
    assert choose_style("centralized:gn") == KNOWN["centralized"]
    assert choose_style("gn_ws") != choose_style("gn")
    assert choose_style("mine").color in OTHERS
    assert choose_style("mine") == choose_style("mine")
    assert choose_styles(["fbn", "gn"])["gn"] == choose_styles(["gn"])["gn"] == choose_style("gn")


def test_colors_differ_between_names_and_styles_between_variants():
    palette = [look.color for look in KNOWN.values()] + list(OTHERS)
    assert len(set(palette)) == len(palette)
    labels = ["fixbn", "fixbn auto", "fixbn 0.25", "fixbn pool", "fixbn frozen"]
    chosen = choose_styles(labels)
    assert len(set(chosen.values())) == len(labels)
    assert {look.color for look in chosen.values()} == {KNOWN["fixbn"].color}


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("color", [*(look.color for look in KNOWN.values()), *OTHERS])
def test_colors_are_readable_on_light_and_dark(color):
    css = files("fednorm.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r"--ground: (#\w{6})", css)[:2]
    assert (luminance(light) + 0.05) / (luminance(color) + 0.05) >= 3
    assert (luminance(color) + 0.05) / (luminance(dark) + 0.05) >= 3
