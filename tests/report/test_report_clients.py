"""What data clients have and what they reach: counted, and published unless it is private."""

from dataclasses import replace

import numpy as np
import pytest

from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from fednorm.report.clients import describe_labels, list_client_values, render_labels
from report.report_cases import comparison, page, personal, run

TINY = {"strategies": "gn", "clients": 4, "rounds": 1, "seeds": 1, "partition": "dirichlet=0.3"}


def test_labels_are_counted_by_client():
    counts = np.array(run_comparison(build_experiment(TINY)).label_counts)
    assert counts.shape == (4, 10)
    assert counts.sum() == 1397
    assert (counts.sum(axis=1) > 300).all()  # sizes are equal, mixes are not
    assert (counts.min(axis=1) < 10).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "secret", [{"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}}, {"secure": True}]
)
def test_labels_of_single_clients_stay_secret(secret):
    result = run_comparison(build_experiment({**TINY, **secret}))
    assert result.label_counts == ()
    assert result.to_json()["label_counts"] == ()


def test_the_page_shows_what_data_each_client_has():
    counts = ((9, 0, 1), (0, 8, 0))
    result = replace(comparison(run("fbn", (0.8,)), config={"seeds": [3, 4]}), label_counts=counts)
    html = page(result)
    assert "What data each client has" in html
    assert "A client has 8 to 10 of them in all. This is seed 3; others divide" in html
    assert render_labels(counts, "0")["wide"] in html
    assert "What data each client has" not in page(replace(result, label_counts=()))


def test_a_circle_is_drawn_for_each_class_that_a_client_has():
    def count(counts):
        return render_labels(counts, "0")["wide"].count("fill: #3a73d3")

    assert count(((9, 0, 1), (0, 8, 0))) - count(((9, 0, 0), (0, 8, 0))) == 1
    many = comparison(run("fbn", (0.8,)), config={"unseen_clients": 5})
    told = describe_labels(replace(many, label_counts=((1,) * 10,) * 200))
    assert "A client has 10 of them in all. The first 60 of 200 clients are shown." in told
    assert "The last 5 of 200 clients never train." in told


def test_the_clients_of_private_runs_are_not_shown():
    open_run, shown = personal("fedbn", (0.9, 0.5)), "Accuracy of each client"
    assert list_client_values(comparison(open_run)) == {"fedbn": [90.0, 50.0]}
    assert shown in page(comparison(open_run))
    private = comparison(replace(open_run, delta=1e-5))
    assert list_client_values(private) == {}
    assert shown not in page(private)
    assert "90.0 · 50.0" not in page(private)
