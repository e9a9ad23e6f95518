"""The heat maps of a comparison that was swept over attacks and defences."""

import pytest

from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment, expand_sweep
from fednorm.report.heatmaps import collect_grid_maps, is_full
from fednorm.report.write import write_comparison

SMALL = {
    "strategies": ["naive", "fbn"],
    "clients": 5,
    "rounds": 1,
    "seeds": 1,
    "batch_size": 4,
    "byzantine": 1,
    "model": {"name": "mlp", "hidden": [4]},
}


@pytest.mark.slow
def test_rows_are_attacks_and_columns_are_defenses(tmp_path):
    values = expand_sweep(SMALL, "attack=foe,alie")
    values = expand_sweep(values, "aggregator+statistics_aggregator=mean,nnm > median")
    comparison = run_comparison(build_experiment(values))
    naive, fbn = collect_grid_maps(comparison)
    assert (naive.title, fbn.title) == ("naive", "fbn")
    assert naive.rows == ("foe", "alie")
    assert naive.columns == ("mean", "nnm > median")
    finals = {run.strategy: 100 * run.final.accuracy for run in comparison.runs}
    assert fbn.cells["alie", "nnm > median"] == finals["fbn, alie, nnm > median"]
    assert is_full(comparison)
    page = write_comparison(comparison, tmp_path).read_text(encoding="utf-8")
    assert "Attacks and defences" in page
    assert "nnm &gt; median" in page


def test_a_comparison_without_a_grid_has_no_map():
    assert not collect_grid_maps(run_comparison(build_experiment(SMALL)))
    assert not collect_grid_maps(
        run_comparison(build_experiment(expand_sweep(SMALL, "attack=foe,alie")))
    )


def test_a_grid_with_holes_is_not_full():
    entries = [
        {"name": "fbn", "label": "honest", "byzantine": 0, "aggregator": "mean"},
        {"name": "fbn", "label": "attacked", "byzantine": 1, "aggregator": "mean"},
        {"name": "fbn", "label": "defended", "byzantine": 1, "aggregator": "median"},
    ]
    comparison = run_comparison(build_experiment({**SMALL, "strategies": entries, "attack": "foe"}))
    assert collect_grid_maps(comparison)
    assert not is_full(comparison)  # its figure is that of the curves
