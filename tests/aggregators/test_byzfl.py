"""Every rule against byzfl's, on inputs where byzfl has one answer."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch

from fednorm.aggregators import create_aggregator

F = 2
PAIRS = {
    "median": [("Median",)],
    "trimmed_mean": [("TrMean", F)],
    "mean_around_median": [("Meamed", F)],
    "geometric_median(start=zero, iterations=3, smoothing=0.1)": [("GeometricMedian",)],
    "geometric_median(start=zero, iterations=9, smoothing=0.5)": [("GeometricMedian", 0.5, 9)],
    "krum": [("Krum", F)],
    "multi_krum": [("MultiKrum", F)],
    "centered_clipping(start=zero, iterations=1, radius=2)": [("CenteredClipping", None, 1, 2.0)],
    "centered_clipping(start=zero, iterations=5, radius=1)": [("CenteredClipping", None, 5, 1.0)],
    "nnm > mean": [("NNM", F), ("Average",)],
    "nnm > trimmed_mean": [("NNM", F), ("TrMean", F)],
    "nnm > krum": [("NNM", F), ("Krum", F)],
    "norm_clipping > mean": [("ARC", F), ("Average",)],
    "norm_clipping(radius=2) > median": [("Clipping", 2.0), ("Median",)],
    "norm_clipping > nnm > median": [("ARC", F), ("NNM", F), ("Median",)],
    "bucketing(size=1) > median": [("Bucketing", 1), ("Median",)],
    "bucketing(size=4, f=0) > mean(f=0)": [("Average",)],
}


@pytest.fixture(scope="module")
def byzfl():
    """byzfl's rules alone: its package would import what it needs for training as well."""
    spec = find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed: pip install '.[peers]'")
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "byzfl", package)
        names = [f"byzfl.aggregators.{name}" for name in ("aggregators", "preaggregators")]
        yield {k: v for name in names for k, v in vars(importlib.import_module(name)).items()}


def inputs(kind, n, d):
    rng = np.random.default_rng([n, d])
    if kind == "constant":
        return np.full((n, d), 0.25)
    if kind == "tied":  # equal rows: whichever of them is taken, the result is the same
        return rng.normal(size=(n // 2, d))[np.arange(n) % (n // 2)]
    x = rng.normal(size=(n, d))
    if kind == "huge":
        x[1], x[-2] = x[1] * 1e30, -x[0] * 1e30
    return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "tied", "huge", "constant"])
@pytest.mark.parametrize(("n", "d"), [(8, 5), (12, 40), (20, 3)])
@pytest.mark.parametrize("text", PAIRS)
def test_a_rule_is_byzfls(byzfl, text, n, d, kind):
    x = inputs(kind, n, d)
    if kind == "tied" and "krum" in text.split(">")[-1]:
        x[0] *= 0.5  # of two equal pairs byzfl takes either
    found = create_aggregator(text, F)(torch.from_numpy(x), torch.ones(n))
    expected = x.copy()
    for name, *arguments in PAIRS[text]:
        with np.errstate(divide="ignore"):  # at a distance of 0
            expected = byzfl[name](*arguments)(expected)
    scale = np.median(np.abs(x)) + np.abs(expected).max()
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-7 * scale)
