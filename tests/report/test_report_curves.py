"""The curves and their colours."""

import re
import struct
from importlib.resources import files

import pytest

from fednorm.report.colors import KNOWN, OTHERS, style, styles
from fednorm.report.curve import breaks, curve
from fednorm.report.plots import curves, curves_svg
from report.report_cases import EDGE_CASES, NAN, diverged, run, three_strategies


def test_a_curve_covers_every_round_that_a_seed_has():
    runs = (run("fbn", (0.2, 0.4, NAN)), diverged("fbn", (0.4,), 1))
    line = curve(runs)
    assert line.rounds == (10, 20)
    assert line.mean == pytest.approx((30, 40))
    assert line.low == pytest.approx((20, 40))
    assert line.high == pytest.approx((40, 40))
    assert breaks(runs) == [(10, pytest.approx(40))]


@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_the_png_is_a_png_of_a_plausible_size(result, tmp_path):
    curves(result, tmp_path / "c.png")
    content = (tmp_path / "c.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1080
    assert 200 <= height <= 1200
    assert 2_000 < len(content) < 500_000


@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_the_svg_is_the_same_every_time_and_names_every_strategy(result):
    svg = curves_svg(result)
    assert svg == curves_svg(result)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#010203" not in svg
    shown = [s.strategy for s in result.summaries() if s.accuracy is not None]
    assert all(f">{label[:31]}" in svg for label in shown)
    assert ("Nothing to plot" in svg) is (not shown)


def test_the_svg_draws_lines_in_the_colours_of_the_strategies():
    svg = curves_svg(three_strategies())
    assert all(KNOWN[name].color in svg for name in ("centralized", "fbn", "naive"))
    assert KNOWN["gn"].color not in svg


def test_a_name_has_one_colour_everywhere():
    assert style("fixbn auto") == style("FixBN") == style("fixbn:gn") == KNOWN["fixbn"]
    assert style("centralized:gn") == KNOWN["centralized"]
    assert style("gn_ws") != style("gn")
    assert style("mine").color in OTHERS
    assert style("mine") == style("mine")
    assert styles(["fbn", "gn"])["gn"] == styles(["gn"])["gn"] == style("gn")


def test_colours_differ_between_names_and_styles_between_variants():
    palette = [look.color for look in KNOWN.values()] + list(OTHERS)
    assert len(set(palette)) == len(palette)
    labels = ["fixbn", "fixbn auto", "fixbn 0.25", "fixbn pool", "fixbn frozen"]
    chosen = styles(labels)
    assert len(set(chosen.values())) == len(labels)
    assert {look.color for look in chosen.values()} == {KNOWN["fixbn"].color}


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("color", [*(look.color for look in KNOWN.values()), *OTHERS])
def test_colours_are_readable_on_light_and_dark(color):
    css = files("fednorm.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = re.findall(r"--ground: (#\w{6})", css)[:2]
    assert (luminance(light) + 0.05) / (luminance(color) + 0.05) >= 3
    assert (luminance(color) + 0.05) / (luminance(dark) + 0.05) >= 3
