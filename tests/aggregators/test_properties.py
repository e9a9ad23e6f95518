"""Properties of any input: generated vectors, Byzantine ones of up to 1e30."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generated import aggregate, crowds, only_honest


@pytest.mark.slow
@pytest.mark.parametrize("text", ["median", "trimmed_mean", "bucketing(size=1) > median"])
@given(crowd=crowds(np.float32))
def test_byzantine_vectors_cannot_move_it_out_of_the_honest_range(text, crowd):
    values, f, honest = crowd
    found, truth = aggregate(text, values, f), values[honest]
    assert (found >= truth.amin(0)).all()
    assert (found <= truth.amax(0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["median", "trimmed_mean", "krum", "multi_krum", "nnm > median"])
@given(crowd=crowds(), factor=st.sampled_from([0.5, -2.0, 1e-9, 1e25]))
def test_a_factor_of_all_is_one_of_the_result(text, crowd, factor):
    values, f = only_honest(crowd)
    found = aggregate(text, values * factor, f) / factor
    close(found, aggregate(text, values, f))


@given(crowd=crowds())
@settings(max_examples=30)
def test_the_geometric_median_has_the_least_sum_of_distances(crowd):
    values, f = only_honest(crowd)
    found = aggregate("geometric_median", values, f)

    def total(point):
        return float((values - point).norm(dim=1).sum())

    here = total(found)
    for other in [*values, values.mean(0), values.median(0).values]:
        assert here <= total(other) + 1e-4
    for step in (1e-2, -1e-2):
        assert here <= total(found + step) + 1e-6


@pytest.mark.slow
@given(crowd=crowds())
def test_without_byzantine_vectors_rules_are_means(crowd):
    values, _ = only_honest(crowd)
    for text in ("trimmed_mean", "mean_around_median", "multi_krum", "nnm > mean", "nnm > median"):
        close(aggregate(text, values, 0), values.mean(0))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
