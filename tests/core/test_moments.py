"""The algebra of moments: merging equals numpy on all the data together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm import Moments, pool

sizes = st.integers(0, 7)
offsets = st.sampled_from([0.0, 1.0, -3e3, 1e6])
scales = st.sampled_from([1.0, 10.0, float(np.sqrt(1e-3))])


@st.composite
def samples(draw):
    """Some sets of values with 2 channels: empty, single, far from zero, of tiny variance."""
    offset, scale = draw(offsets), draw(scales)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 5))
    return [rng.normal(offset, scale, (draw(sizes), 2)) for _ in range(count)]


def moments(values):
    return Moments.of(torch.from_numpy(values))


def assert_same(left, right):
    assert left.count == pytest.approx(right.count)
    scale = max(1.0, float(right.mean.abs().max()))
    torch.testing.assert_close(left.mean, right.mean, rtol=0, atol=1e-14 * scale)
    # A mean near 1e6 is known to 1e-10, so a variance is known to about 1e-10 times the spread.
    spread = float(right.var.max()) ** 0.5
    torch.testing.assert_close(left.var, right.var, rtol=1e-9, atol=1e-14 * scale * (1 + spread))


def fold(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    return total


@given(samples())
def test_merging_equals_numpy_on_all_data(parts):
    all_batches = np.concatenate(parts)
    for merged in (fold([moments(p) for p in parts]), pool([moments(p) for p in parts])):
        assert merged.count == len(all_batches)
        if len(all_batches):
            scale = max(1.0, np.abs(all_batches).max())
            np.testing.assert_allclose(merged.mean, all_batches.mean(0), rtol=0, atol=1e-14 * scale)
            np.testing.assert_allclose(
                merged.var, all_batches.var(0), rtol=1e-6, atol=1e-20 * scale**2
            )


@given(samples())
def test_merging_is_commutative(parts):
    forward, backward = [moments(p) for p in parts], [moments(p) for p in reversed(parts)]
    assert_same(fold(forward), fold(backward))
    assert_same(pool(forward), pool(backward))


@given(samples(), samples(), samples())
def test_merging_is_associative(a, b, c):
    x, y, z = (moments(np.concatenate(parts)) for parts in (a, b, c))
    assert_same(x.merge(y).merge(z), x.merge(y.merge(z)))


@pytest.mark.slow
@given(samples())
def test_the_empty_summary_is_the_identity(parts):
    some = moments(np.concatenate(parts))
    nothing = Moments.empty(some.mean)
    for merged in (some.merge(nothing), nothing.merge(some), pool([nothing, some, nothing])):
        assert merged.count == some.count
        torch.testing.assert_close(merged.mean, some.mean, rtol=0, atol=0)
        torch.testing.assert_close(merged.var, some.var, rtol=0, atol=0)


def test_large_offset_keeps_a_tiny_variance():
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e6, np.sqrt(1e-3), (50, 3)) for _ in range(20)]
    merged = pool([moments(p) for p in parts])
    np.testing.assert_allclose(merged.var, np.concatenate(parts).var(0), rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 2)])
def test_moments_of_a_batch_are_per_channel(shape):
    batch = torch.randn(shape, dtype=torch.float64)
    summary = Moments.of(batch)
    values = batch.transpose(0, 1).flatten(1)
    assert summary.count == values.shape[1]
    torch.testing.assert_close(summary.mean, values.mean(1))
    torch.testing.assert_close(summary.unbiased_var, values.var(1, correction=1))


def test_one_value_has_no_variance():
    summary = Moments.of(torch.tensor([[3.0, -1.0]]))
    assert summary.count == 1
    assert summary.unbiased_var.tolist() == [0.0, 0.0]
