"""Words inside the curves: ends, freezing rounds, and errors on a logarithmic axis."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fednorm
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from fednorm.report.annotations import spread_apart
from fednorm.report.curves import NARROW, WIDE, overlap, render_errors, render_panel
from fednorm.report.series import collect_plots
from fednorm.report.write import wrap_comparison
from report.report_cases import comparison, page, run, three_strategies


@given(st.lists(st.floats(0, 1), min_size=1, max_size=14))
def test_labels_keep_their_order_and_do_not_touch(heights):
    before = {str(i): height for i, height in enumerate(heights)}
    after = spread_apart(before)
    assert after.keys() == before.keys()
    assert all(above - below > 0.05 - 1e-5 for below, above in pairwise(after.values()))
    ordered = [before[label] for label in after]
    assert ordered == sorted(ordered)
    assert all(-1e-6 <= height <= 1 + 1e-6 for height in after.values())


def test_curves_have_their_name_at_the_end_where_there_is_room():
    drawn = collect_plots(wrap_comparison(three_strategies()))
    wide, narrow = (render_panel(drawn, drawn.panels[0], size) for size in (WIDE, NARROW))
    assert all(f">{name}</text>" in wide for name in ("centralized", "fbn", "naive"))
    assert ">fbn</text>" not in narrow
    crowd = comparison(*(run(f"entry {number}", (0.1, 0.9)) for number in range(20)))
    drawn = collect_plots(wrap_comparison(crowd))
    assert ">entry 1</text>" not in render_panel(drawn, drawn.panels[0], WIDE)


def test_the_freezing_round_is_labelled():
    runs = [run("fixbn", (0.4, 0.8), seed, frozen_from=11 + seed) for seed in (0, 1)]
    assert ">fixbn frozen from round 11 to 12</text>" in page(comparison(*runs))
    assert ">fixbn frozen from round 11</text>" in page(comparison(runs[0]))
    assert "frozen from" not in page(comparison(replace(runs[0], frozen_from=None)))


def test_errors_are_drawn_on_a_logarithmic_axis_and_open_where_curves_meet():
    apart, close = (comparison(run("fbn", (0.2, 0.9)), run("gn", (0.3, b))) for b in (0.6, 1.0))
    closer = comparison(run("fbn", (0.2, 0.99)), run("gn", (0.3, 1.0)))
    plots = collect_plots(wrap_comparison(closer))
    svg = render_errors(plots, plots.panels[0], NARROW)  # an error of 0 has no logarithm
    assert all(f">{tick}</text>" in svg for tick in ("1", "10"))
    assert overlap(plots, plots.panels[0])
    assert '<details class="errors" open>' in page(closer)
    assert all('<details class="errors">' in page(result) for result in (apart, close))


FREEZING = {"strategies": "fixbn", "rounds": 8, "seeds": 1, "clients": 3}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 5),
        ({"freeze_round": 3}, 4),
        ({"freeze_round": "auto", "window": 3, "threshold": 1e9}, 4),
        ({"freeze_round": 0}, None),  # it never was different
        ({"freeze_round": 1.0}, None),
    ],
)
def test_a_run_records_when_its_statistics_freeze(fields, expected):
    changed = {**FREEZING, "strategies": [{"name": "fixbn", **fields}]}
    (found,) = run_comparison(build_experiment(changed)).runs
    assert found.frozen_from == expected


def test_other_strategies_do_not_freeze():
    assert fednorm.simulate("fbn", rounds=4, clients=3).frozen_from is None


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 6])
def test_a_resumed_run_remembers_when_its_statistics_froze(stop, tmp_path):
    class StopAfter:
        rounds = 0

        def is_set(self):
            return self.rounds >= stop

        def count(self, event):
            self.rounds = event.round

    watch = StopAfter()
    experiment = build_experiment(FREEZING)
    saving = CheckpointPolicy(every=1)
    monitor = Monitor([watch.count], watch)
    (cut,) = run_comparison(experiment, folder=tmp_path, monitor=monitor, saving=saving).runs
    assert (cut.status, cut.rounds) == ("interrupted", stop)
    (resumed,) = run_comparison(experiment, folder=tmp_path, saving=saving).runs
    assert (resumed.status, resumed.frozen_from) == ("finished", 5)
    (read,) = run_comparison(experiment, folder=tmp_path, saving=saving).runs
    assert read.frozen_from == 5
