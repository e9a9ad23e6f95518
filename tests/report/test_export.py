"""Files for a paper: widths, fonts, whole labels, captions."""

import csv
import re
from dataclasses import replace

import pytest

from fednorm.errors import ConfigError
from fednorm.experiment.results import PanelResult
from fednorm.experiment.summary.significance import TableSpec
from fednorm.report import export as module
from fednorm.report.export import ExportRequest, export_figure
from fednorm.report.styles import write_print
from fednorm.report.write import wrap_comparison
from report.report_cases import EDGE_CASES, comparison, run, three_strategies, told, two_panels

LONG = "a strategy with a label that is longer than a column is wide, and is never cut " * 2


def read_texts(monkeypatch, figure, folder, **changes):
    """Export, and return the texts of each figure that is drawn, and its size."""
    seen = {}

    def look(draw, file, kind):
        def remember(ink):
            drawn = draw(ink)
            legends = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
            ticks = [label.get_text() for a in drawn.axes for label in a.get_yticklabels()]
            seen[draw.func.__name__] = (legends, ticks, drawn)
            return drawn

        write_print(remember, file, kind)

    monkeypatch.setattr(module, "write_print", look)
    export_figure(figure, folder, ExportRequest(("png",), **changes))
    return seen["_draw_curves"], seen["_draw_finals"]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "width"), [("one", 3.25), ("two", 6.75)])
def test_labels_are_whole_and_inside_the_column(monkeypatch, tmp_path, columns, width):
    runs = comparison(run(LONG, (0.8, 0.9)), *EDGE_CASES["many"].runs)
    figure = wrap_comparison(runs)
    curves, finals = read_texts(monkeypatch, figure, tmp_path, columns=columns)
    assert curves[0][0].replace("\n", " ").strip() == LONG.strip()
    assert finals[1][0].replace("\n", " ").strip() == LONG.strip()
    assert len(curves[0]) == len(finals[1]) == len(EDGE_CASES["many"].runs) + 1
    for *_, drawn in (curves, finals):
        assert drawn.get_figwidth() == width
        box = drawn.get_tightbbox()
        assert box.x0 >= -0.01
        assert box.x1 <= width + 0.01
        assert box.y0 >= -0.01
        assert box.y1 <= drawn.get_figheight() + 0.01
        sizes = {
            text.get_fontsize() for text in drawn.findobj(lambda o: hasattr(o, "get_fontsize"))
        }
        assert min(sizes) >= 7


@pytest.mark.slow
def test_the_axis_of_curves_shows_what_is_possible(monkeypatch, tmp_path):
    runs = comparison(run("fbn", (0.02, 0.9)), run("fbn", (0.3, 1.0), seed=1))
    curves, _ = read_texts(
        monkeypatch, wrap_comparison(runs), tmp_path, spec=TableSpec(spread="ci95")
    )
    low, high = curves[2].axes[0].get_ylim()
    assert -5 < low < high < 105  # the interval of two seeds reaches from −162 to 194 %


@pytest.mark.slow
def test_a_pdf_has_the_width_of_a_column_and_embedded_fonts(tmp_path):
    request = ExportRequest(("pdf", "svg", "latex"))
    files = export_figure(wrap_comparison(three_strategies()), tmp_path, request)
    names = {path.name for path in files}
    drawn = {f"{name}.{kind}" for name in ("curves", "finals") for kind in ("pdf", "svg")}
    assert names == drawn | {"table.tex", "figures.tex", "captions.txt"}
    pdf = (tmp_path / "curves.pdf").read_bytes()
    assert re.search(rb"/MediaBox \[ 0 0 234 ", pdf)  # 3.25 inches
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    svg = (tmp_path / "curves.svg").read_text()
    assert 'width="234pt"' in svg
    assert "<text" not in svg  # letters are outlines: the same on every machine
    included = (tmp_path / "figures.tex").read_text()
    assert r"\includegraphics[width=\columnwidth]{curves.pdf}" in included


@pytest.mark.slow
def test_captions_say_what_bands_are(tmp_path):
    runs = (replace(one, frozen_from=11) for one in three_strategies().runs)
    spec = TableSpec(spread="ci95")
    figure = wrap_comparison(replace(comparison(*runs), missing=("gn seed 0",)))
    export_figure(figure, tmp_path, ExportRequest(("png", "latex"), "two", spec))
    caption, _ = (tmp_path / "captions.txt").read_text().splitlines()
    for text in (
        "95 % confidence interval (Student's t) over n = 2 seeds",
        "fbn freezes its statistics from round 11",
        "Not finished and left out: gn seed 0",
        "mlp on digits",
    ):
        assert text in caption
    assert (
        r"\includegraphics[width=\textwidth]{curves.png}" in (tmp_path / "figures.tex").read_text()
    )
    assert "Not finished and left out: gn seed 0." in (tmp_path / "table.tex").read_text()


def test_rows_and_tables_of_panels_tell_their_panel(tmp_path):
    export_figure(two_panels(), tmp_path, ExportRequest(("csv", "latex")))
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["panel"] for row in rows] == ["γ = 0"] * 3 + ["γ = 0.01"] * 3
    text = (tmp_path / "table.tex").read_text()
    assert text.count(r"\begin{tabular}") == 2
    assert r"\label{tab:results-2}" in text
    assert r"\caption{$\gamma$ = 0.01: dirichlet" in text.replace("Γ", r"$\gamma$")


def test_the_title_of_a_panel_begins_its_caption_as_it_is(tmp_path):
    export_figure(told(PanelResult("iid", three_strategies())), tmp_path, ExportRequest(("latex",)))
    assert "\\caption{iid: " in (tmp_path / "table.tex").read_text()


def test_a_reference_that_one_panel_lacks_is_left_out_there(tmp_path):
    spec = TableSpec(against="gn")
    export_figure(two_panels(), tmp_path, ExportRequest(("latex",), spec=spec))
    first, second = (tmp_path / "table.tex").read_text().split(r"\end{table}")[:2]
    assert r"$\Delta$" not in first
    assert r"$\Delta$ gn" in second


def test_wrong_names_are_refused():
    with pytest.raises(ConfigError, match="no format 'doc'; there are csv, latex, pdf, svg, png"):
        ExportRequest(("doc",))
    with pytest.raises(ConfigError, match="columns must be one or two, but are 'three'"):
        ExportRequest(columns="three")


def test_nothing_to_draw_is_an_error(tmp_path):
    figure = told(PanelResult("", EDGE_CASES["no evaluation"]))
    with pytest.raises(ConfigError, match="nothing to draw, as no run was evaluated"):
        export_figure(figure, tmp_path, ExportRequest(("png",)))
