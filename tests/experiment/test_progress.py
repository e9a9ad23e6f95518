"""Progress is shown as bars where these can move, else in a few lines, and not if unwanted."""

import io

import pytest
from rich.console import Console

import fednorm
from fednorm.experiment.callbacks import progress
from fednorm.experiment.results import Evaluation, Event, RunResult
from fednorm.experiment.schema.load import build_experiment

SMALL = {"strategies": ["gn", "fbn"], "clients": 3, "rounds": 100, "seeds": 1}


class Clock:
    """Replaces the module `time`."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def show(seconds, clock, rounds=100):
    """Return the lines of a run whose rounds take some time."""
    lines = []
    shown = progress.PlainProgress(build_experiment(SMALL), lines.append)
    for number in range(1, rounds + 1):
        clock.now += seconds
        tested = Evaluation(number, 0.5, 1.0, 1.0) if number % 10 == 0 else None
        shown.on_round(Event("fbn", 0, number, 1.0, evaluation=tested))
    return lines


def test_fast_runs_write_a_line_a_second_at_most(clock):
    assert show(0.001, clock) == []
    lines = show(0.1, clock)
    assert len(lines) == 5  # each tenth of 200 rounds
    assert lines[0] == "20 of 200 rounds after 0:00:02: fbn seed 0, round 20, accuracy 50.0%"


def test_slow_runs_write_a_line_every_ten_seconds(clock):
    lines = show(3.0, clock, rounds=19)
    assert [line.split()[0] for line in lines] == ["4", "8", "12", "16"]
    assert lines[0] == "4 of 200 rounds after 0:00:12: fbn seed 0, round 4"


def test_a_label_is_text(clock):
    written = io.StringIO()
    with progress.show_progress(build_experiment(SMALL), Console(file=written)) as shown:
        clock.now += 11.0
        shown.on_round(Event("a[/x]", 0, 1, 1.0))
    assert "a[/x] seed 0, round 1" in written.getvalue()


def test_runs_that_end_early_or_were_made_before_count_as_done(clock):
    lines = []
    shown = progress.PlainProgress(build_experiment(SMALL), lines.append)
    shown.on_skip(RunResult("gn", 0, "finished", (), 100, 1, 1, 1, 1))
    assert shown.sum == 100
    clock.now = 11.0
    shown.on_round(Event("fbn", 0, 7, 1.0))
    shown.on_end(RunResult("fbn", 0, "interrupted", (), 7, 1, 1, 1, 1))
    assert shown.sum == 107
    shown.on_end(RunResult("fbn", 0, "stopped early", (), 7, 1, 1, 1, 1))
    assert shown.sum == 200
    assert lines == ["107 of 200 rounds after 0:00:11: fbn seed 0, round 7"]


@pytest.mark.parametrize(
    ("jupyter", "terminal", "widgets", "draws"),
    [
        (False, True, False, True),
        (False, False, False, False),
        (True, False, True, True),
        (True, False, False, False),
    ],
)
def test_bars_are_drawn_where_they_can_move(jupyter, terminal, widgets, draws, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda _: object() if widgets else None)
    console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=jupyter)
    assert progress.can_draw(console) is draws


def test_bars_show_every_run(monkeypatch):
    written = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr("fednorm.api.Console", lambda: written)
    fednorm.compare(**{**SMALL, "rounds": 3})
    shown = written.file.getvalue()
    assert "all rounds" in shown
    assert "gn seed 0" in shown
    assert "6/6" in shown


@pytest.mark.parametrize(("chosen", "lines"), [(None, 0), (False, 0), (True, 1)])
def test_python_is_silent_without_a_terminal_unless_asked(chosen, lines, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(progress, "_SHORTEST", 0.0)
    fednorm.compare(**{**SMALL, "rounds": 1}, progress=chosen)
    assert bool(capsys.readouterr().out) == bool(lines)
