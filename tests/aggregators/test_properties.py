"""Properties of any input: generated vectors, Byzantine ones of up to 1e30."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednorm.aggregators import create_aggregator

ROBUST = ["median", "trimmed_mean", "mean_around_median", "geometric_median", "krum", "multi_krum"]
EQUIVARIANT = [*ROBUST, "centered_clipping", "nnm > median", "nnm > mean"]


@st.composite
def crowds(draw, dtype=np.float64):
    """Honest vectors, f Byzantine ones, as few as Krum needs; and a mask of the honest."""
    f = draw(st.integers(1, 4))
    honest, d = draw(st.integers(f + 3, 14)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    truth = rng.normal(draw(st.sampled_from([0, 1, -40])), 1, (honest, d))
    sizes = st.sampled_from([0.0, 1.0, 3.5, 1e6, 1e30])
    false = [[draw(sizes) * draw(st.sampled_from([1, -1])) for _ in range(d)] for _ in range(f)]
    order = rng.permutation(honest + f)
    return torch.from_numpy(np.concatenate([truth, false])[order].astype(dtype)), f, order < honest


def alone(crowd):
    """Return the honest vectors alone, and the f that a rule may have for them."""
    values, f, honest = crowd
    return values[honest], min(f, (int(honest.sum()) - 3) // 2)


def aggregate(text, values, f):
    return create_aggregator(text, f)(values, torch.ones(len(values)))


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "bucketing(size=1) > median"])
@given(crowd=crowds(np.float32))
def test_byzantine_vectors_cannot_move_it_out_of_the_honest_range(text, crowd):
    values, f, honest = crowd
    found, truth = aggregate(text, values, f), values[honest]
    assert (found >= truth.amin(0)).all()
    assert (found <= truth.amax(0)).all()


@pytest.mark.parametrize(
    "text", [*ROBUST, "centered_clipping", "nnm > trimmed_mean", "norm_clipping > median"]
)
@given(crowd=crowds(np.float32))
def test_byzantine_vectors_cannot_send_it_far_away(text, crowd):
    values, f, honest = crowd
    found, truth = aggregate(text, values, f), values[honest]
    # A small multiple of the honest spread; Byzantine vectors may be 1e30 away.
    spread = float((truth.amax(0) - truth.amin(0)).norm() + truth.norm(dim=1).max())
    assert float((found - truth.mean(0)).norm()) <= 60 * spread


@pytest.mark.parametrize("text", EQUIVARIANT)
@given(crowd=crowds(), seed=st.integers(0, 2**32))
def test_the_order_of_clients_does_not_matter(text, crowd, seed):
    values, f = alone(crowd)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(values)))
    close(aggregate(text, values[order], f), aggregate(text, values, f))


@pytest.mark.parametrize("text", EQUIVARIANT)
@given(crowd=crowds(), shift=st.sampled_from([0.25, -3.0, 1000.0]))
def test_a_shift_of_all_shifts_the_result(text, crowd, shift):
    values, f = alone(crowd)
    close(aggregate(text, values + shift, f), aggregate(text, values, f) + shift)


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "krum", "multi_krum", "nnm > median"])
@given(crowd=crowds(), factor=st.sampled_from([0.5, -2.0, 1e-9, 1e25]))
def test_a_factor_of_all_is_one_of_the_result(text, crowd, factor):
    values, f = alone(crowd)
    found = aggregate(text, values * factor, f) / factor
    close(found, aggregate(text, values, f))


@given(crowd=crowds())
@settings(max_examples=30)
def test_the_geometric_median_has_the_least_sum_of_distances(crowd):
    values, f = alone(crowd)
    found = aggregate("geometric_median", values, f)

    def total(point):
        return float((values - point).norm(dim=1).sum())

    here = total(found)
    for other in [*values, values.mean(0), values.median(0).values]:
        assert here <= total(other) + 1e-4
    for step in (1e-2, -1e-2):
        assert here <= total(found + step) + 1e-6


@given(crowd=crowds())
def test_without_byzantine_vectors_rules_are_means(crowd):
    values, _ = alone(crowd)
    for text in ("trimmed_mean", "mean_around_median", "multi_krum", "nnm > mean", "nnm > median"):
        close(aggregate(text, values, 0), values.mean(0))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
