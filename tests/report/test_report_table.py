"""The table, in the terminal and on the page."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fednorm.report.tables import build_table, fill_rows, group_rows, list_columns, write_caption
from report.report_cases import (
    Elements,
    comparison,
    diverged,
    page,
    personal,
    run,
    three_strategies,
)


def test_rows_hold_means_over_seeds():
    row = fill_rows(three_strategies())[1]
    assert row == {
        "strategy": "fbn",
        "final accuracy %": "81.0 ± 1.4",
        "Δ": "−2.0",
        "best %": "81.0",
        "exchanges / round": "1",
        "up / round": "44.43 kB",
        "down / round": "1.08 MB",
        "s / run": "12.3",
        "note": "",
    }


def test_strategies_with_different_data_are_not_ranked():
    entries = ["centralized", "fbn", {"name": "naive", "partition": "iid"}]
    runs = three_strategies().runs
    assert any(group.best for group in group_rows(comparison(*runs)))
    mixed = comparison(*runs, config={"strategies": entries})
    assert "Δ" not in list_columns(mixed)
    assert "Δ" not in write_caption(mixed)
    assert [group.best for group in group_rows(mixed)] == [frozenset()]


def test_the_worst_client_has_a_column_only_where_it_was_measured():
    assert "worst client %" not in list_columns(three_strategies())
    result = comparison(run("fbn", (0.8,)), personal("fedbn", (0.9, 0.5)))
    assert [row["worst client %"] for row in fill_rows(result)] == ["–", "50.0"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 140])
def test_untrained_clients_are_noted(width):
    part = personal("fedbn", (0.9, 0.5))
    last = replace(part.final, trained=0.9, untrained=0.5)
    result = comparison(part, replace(part, strategy="silobn", history=(last,)))
    note = "mean over clients (90.0 % trained, 50.0 % untrained)"
    assert [row["note"] for row in fill_rows(result)] == ["mean over clients", note]
    assert note in page(result)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(build_table(result))
    assert all(word in capture.get() for word in note.split())


def test_failures_are_noted_by_seed():
    result = comparison(
        run("naive", (0.2, 0.3), 0),
        diverged("naive", (0.2,), 1, error="loss is nan\n at client 3"),
        diverged("naive", (), 2, error="loss is nan at client 3"),
        run("fbn", (0.4,), 0, status="interrupted"),
        run("gn", (0.4,), 0, rejected=2),
    )
    assert [row["note"] for row in fill_rows(result)] == [
        "seeds 1, 2 diverged: loss is nan at client 3",
        "1 of 3 seeds; seed 0 interrupted",
        "1 of 3 seeds; 2 replies rejected",
    ]


@pytest.mark.parametrize("message", ["x" * 500, "word " * 100])
def test_a_long_message_is_cut_in_the_table_and_whole_on_the_page(message):
    result = comparison(diverged("naive", error=message))
    note = fill_rows(result)[0]["note"]
    assert len(note) < 90
    assert note.endswith(" …")
    assert f"<pre>{message}</pre>" in page(result)


def test_a_strategy_without_any_round_has_no_numbers():
    row = fill_rows(comparison(diverged("naive")))[0]
    assert row["final accuracy %"] == row["best %"] == row["up / round"] == "–"


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_every_number_of_the_rows(width):
    failed = diverged("naive", (0.2,), error="the loss is not finite at client 3, round 41")
    result = comparison(run("[red]fbn", (0.8,)), personal("fedbn", (0.9, 0.5)), failed)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(build_table(result))
    shown = capture.get()
    assert max(len(line) for line in shown.splitlines()) <= width
    for row in fill_rows(result):
        assert all(cell in shown for title, cell in row.items() if title != "note")
        assert all(word in shown for word in row["note"].split())
    assert {c.justify for c in build_table(result).columns[1:-1]} == {"right"}


def test_the_page_shows_the_same_cells_as_the_terminal():
    result = three_strategies()
    cells = Elements(page(result).split("<tbody>")[1].split("</tbody>")[0]).cells
    assert cells == [cell for row in fill_rows(result) for cell in row.values()]


def test_numbers_stay_whole_on_a_narrow_terminal_with_long_names():
    result = comparison(run("fbn with a label that is much too long for it", (0.8123,), 0))
    console = Console(width=80, record=True, quiet=False, file=io.StringIO())
    console.print(build_table(result))
    text = console.export_text()
    for cell in fill_rows(result)[0].values():
        if cell and not cell.startswith("fbn"):
            assert cell in text


def test_differences_are_from_the_reference_and_not_of_personal_models():
    result = comparison(
        run("centralized", (0.9,)), run("fbn", (0.92,)), personal("fedbn", (1.0, 0.9)),
        diverged("gn"),
    )  # fmt: skip
    assert [row["Δ"] for row in fill_rows(result)] == ["–", "+2.0", "–", "–"]
    assert "Δ: points above centralized." in write_caption(result)
    assert "Δ" not in list_columns(comparison(run("fbn", (0.8,))))


def test_the_best_are_marked_among_their_kind():
    result = comparison(
        run("centralized", (0.99,)), run("fbn", (0.9,), tested=400), run("naive", (0.5,)),
        run("gn", (0.895,), tested=400), personal("fedbn", (1.0, 1.0)), personal("silobn", (0.9,)),
    )  # fmt: skip
    shared, own = group_rows(result)
    assert [row["strategy"].text for row in shared.rows] == ["centralized", "fbn", "naive", "gn"]
    assert shared.best == {"fbn", "gn"}  # within the standard error of 400 samples
    assert own.title == "Personal models: mean over clients, each on its own test split"
    assert own.best == {"fedbn"}
    html = page(result)
    assert html.count('class="best"') == 3
    assert html.count('scope="rowgroup"') == 1


def test_nothing_is_marked_if_all_are_level_or_the_only_one():
    level = comparison(run("fbn", (0.8,)), run("gn", (0.8,)))
    assert all(not group.best for group in group_rows(level))
    assert 'class="best"' not in page(comparison(run("fbn", (0.8,))))


@pytest.mark.parametrize("width", [50, 65, 80])
def test_what_does_not_fit_is_left_out_and_named(width):
    result = three_strategies()
    console = Console(width=width)
    with console.capture() as capture:
        console.print(build_table(result, width))
    shown = capture.get()
    assert max(len(line) for line in shown.splitlines()) <= width
    named = " ".join(shown.partition("Not shown at this width:")[2].split())
    kept = [title for title in fill_rows(result)[0] if title not in named]
    assert (len(kept) < len(fill_rows(result)[0])) == (width < 80)
    assert {"strategy", "final accuracy %", "note"} <= set(kept)
    for row in fill_rows(result):
        assert all(row[title] in shown for title in kept if title != "note")
