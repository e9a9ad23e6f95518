"""What data clients have: counted, and published unless it is private."""

import numpy as np
import pytest

from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment

TINY = {"strategies": "gn", "clients": 4, "rounds": 1, "seeds": 1, "partition": "dirichlet=0.3"}


def test_labels_are_counted_by_client():
    counts = np.array(run_comparison(build_experiment(TINY)).label_counts)
    assert counts.shape == (4, 10)
    assert counts.sum() == 1397
    assert (counts.sum(axis=1) > 300).all()  # sizes are equal, mixes are not
    assert (counts.min(axis=1) < 10).all()


@pytest.mark.parametrize(
    "secret", [{"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}}, {"secure": True}]
)
def test_labels_of_single_clients_stay_secret(secret):
    result = run_comparison(build_experiment({**TINY, **secret}))
    assert result.label_counts == ()
    assert result.to_json()["label_counts"] == ()
