"""The fields of a rule say what its function does."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm import create_strategy
from fednorm.core.layer import NormRule, RoundContext
from fednorm.nn import aligned_norm, dual_norm, hybrid_norm, rules, switch_norm
from fednorm.nn.sync_norm import make_sync_rule
from fednorm.strategies.brn import make_renorm_rule

PLAIN = {name: getattr(rules, name) for name in rules.__all__}
RULES = {
    **PLAIN,
    "aligned": aligned_norm.normalize_aligned,
    "aligned measured": aligned_norm.normalize_aligned_measured,
    "dual": dual_norm.normalize_dual,
    "hybrid": hybrid_norm.normalize_hybrid,
    "hybrid measured": hybrid_norm.normalize_hybrid_measured,
    "hybrid calibrated": hybrid_norm.normalize_hybrid_calibrated,
    "renorm": make_renorm_rule(3.0, 5.0, "average"),
    "renorm recorded": make_renorm_rule(3.0, 5.0, "pool"),
    "sync": make_sync_rule(),
    "switched": switch_norm.normalize_switched,
    "switched recorded": switch_norm.normalize_switched_recorded,
    "switched calibrated": switch_norm.normalize_switched_calibrated,
}
METHODS = {
    "aligned": "alignbn",
    "dual": "dualbn",
    "hybrid": "hbn",
    "renorm": "brn",
    "sync": "fedtan",
}
X = torch.arange(24.0, dtype=torch.float64).reshape(4, 3, 2).sin() * 3 + 1


def layer_for(name):
    """Return a layer that a rule applies to, with statistics unlike the initial ones."""
    method = METHODS.get(name.split()[0], "switchnorm" if "switched" in name else "naive")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2)).double()
    layer = create_strategy(method).convert(model).model[0]
    nn.init.constant_(layer.running_mean, 0.5)
    nn.init.constant_(layer.running_var, 2.0)
    return layer


def start(layer, rule, **context):
    layer.start_round(rule, RoundContext(**context), "here")


@pytest.mark.parametrize("name", RULES)
def test_running_statistics_follow_if_it_tracks(name):
    layer, rule = layer_for(name), RULES[name]
    start(layer, rule)
    layer(X)
    assert bool((layer.running_mean != 0.5).any()) is rule.tracks


@pytest.mark.parametrize("name", RULES)
def test_a_layer_reports_if_the_rule_does(name):
    layer, rule = layer_for(name), RULES[name]
    start(layer, rule)
    layer(X)
    assert (layer.report("pool") is None) is (rule.reports == "nothing")


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_rule_normalises_with_what_it_says(name):
    layer, rule = layer_for(name), RULES[name]
    start(layer, rule)
    expected = {
        "batch": functional.batch_norm(X, None, None, training=True),
        "shared": (X - 0.5) / (2.0 + layer.eps) ** 0.5,
    }
    torch.testing.assert_close(layer(X), expected[rule.normalize_with])


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].normalize_with == "mixed"])
def test_a_rule_that_cannot_tell_clients_apart_refuses_merged_batches(name):
    layer = layer_for(name)
    with pytest.raises(ValueError, match="cannot tell apart"):
        start(layer, RULES[name], client_sizes=(2, 2))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_a_value(name):
    rule = RULES[name]
    assert isinstance(rule, NormRule)
    again = pickle.loads(pickle.dumps(rule))  # noqa: S301 (made here)
    assert (again.normalize_with, again.tracks, again.reports) == (
        rule.normalize_with,
        rule.tracks,
        rule.reports,
    )
    layer = layer_for(name)
    other = copy.deepcopy(layer)
    start(layer, rule)
    start(other, again)
    assert torch.equal(rule(layer, X), again(other, X))


def test_layers_outside_of_rounds_follow_their_own_method():
    for method, rule in (("naive", rules.batch_stats), ("switchnorm", RULES["switched"])):
        layer = layer_for("switched" if method == "switchnorm" else "naive")
        assert layer.recorder.rule is rule
