"""`fednorm doctor`: every number against the engine, numpy, or plain torch."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from fednorm.algorithms import create_algorithm
from fednorm.cli import app
from fednorm.core.task import Task
from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.doctor import examine, save
from fednorm.doctor.costs import deal_again, draw
from fednorm.doctor.layers import find_layers
from fednorm.engines.evaluation import calibrate_clients
from fednorm.engines.loop import rounds
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.models import create_model
from fednorm.strategies import STRATEGIES, create_strategy
from support import CLASSES, SHAPE, ToyClients, nested_model

SMALL = {"clients": 5, "batches": 2, "dtype": "float64", "data": "digits", "budget": 0}
STATIC = {"shape": SHAPE, "classes": CLASSES}


@pytest.fixture(scope="module")
def apart():
    return examine("mlp", partition="gamma=0", **SMALL)


@pytest.fixture(scope="module")
def alike():
    return examine("mlp", partition="iid", **SMALL)


@pytest.fixture(scope="module")
def nested():
    return examine(nested_model(), dtype="float64", **STATIC)


def clients_of(rule, batches=2):
    data = load_dataset("digits", 0).to("cpu", torch.float64)
    everyone = build_federation(data, rule, Plan(20, steps=batches), clients=5, seed=0)
    return [list(everyone.batches(client, 1).steps) for client in everyone.all()]


def codes(report):
    return {caution.code: caution for caution in report.warnings}


def gradients(report):
    return {(g.strategy, g.statistics): g for g in report.clients.gradients}


class Wild(nn.Module):
    """Layers in all places, by modules and by functions, under names that tell nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.BatchNorm2d(1)
        self.a = nn.Conv2d(1, 4, 3)
        self.b = nn.BatchNorm2d(4)
        self.c = nn.ReLU(inplace=True)
        self.conv = nn.BatchNorm2d(4)
        self.d = nn.Dropout(0.5)
        self.e = nn.BatchNorm2d(4)
        self.f = nn.BatchNorm2d(4)
        self.g = nn.Linear(4, CLASSES)
        self.h = nn.BatchNorm1d(CLASSES)
        self.unused = nn.BatchNorm1d(3)

    def forward(self, x):
        x = self.conv(self.c(self.b(self.a(self.linear(x)))))
        x = self.e(self.d(functional.relu(x)))
        x = self.f(x + 1)
        return self.h(self.g(x.mean((2, 3))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "places"),
    [
        ([nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()], ["convolution"]),
        ([nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)], ["activation"]),
        ([nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4)], ["activation"]),
        ([nn.Conv2d(1, 4, 3), nn.Identity(), nn.BatchNorm2d(4)], ["convolution"]),
        ([nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.BatchNorm2d(4)], ["other"]),
        ([nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)], ["linear"]),
        ([nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()], ["convolution"]),
    ],
)
def test_places_are_found_in_chains(model, places):
    found = find_layers(nn.Sequential(*model), torch.randn(2, *SHAPE))
    assert [layer.place for layer in found] == places


@pytest.mark.slow
def test_places_are_found_in_any_forward_pass(nested):
    found = {x.path: (x.place, x.after) for x in examine(Wild(), **STATIC).layers}
    assert found == {
        "linear": ("other", "the input"),
        "b": ("convolution", "Conv2d"),
        "conv": ("activation", "ReLU"),
        "e": ("activation", "aten.relu"),
        "f": ("other", "aten.add"),
        "h": ("linear", "Linear"),
        "unused": ("not reached", ""),
    }
    assert {x.place for x in examine("mlp", **STATIC).layers} == {"activation"}
    assert [(x.place, x.channels, x.values) for x in nested.layers] == [
        *[("convolution", 4, 64)] * 3,
        *[("convolution", 6, 16)] * 3,
    ]


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    model = create_model("mlp", SHAPE, 10, seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    examine(model, partition="iid", **SMALL)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training


@pytest.mark.slow
def test_state_is_counted_by_type(nested):
    state = nested.state
    assert state.statistics == state.affine == 8 * 2 * (4 * 3 + 6 * 3)
    assert state.counters == 8 * 6
    assert len(state.statistic_tensors) == 12
    all_batches = sum(t.numel() * t.element_size() for t in nested_model().state_dict().values())
    assert state.total == all_batches == state.weights + 2 * state.affine + state.counters


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_costs_are_those_of_the_engine(nested, name):
    (cost,) = (c for c in nested.strategies if c.strategy == name)
    step = create_algorithm("dsgd", lr=0.05, momentum=0.9)
    task = Task.build(nested_model(), create_strategy(name), step, rounds=600)
    clients = ToyClients(sizes=(5, 5, 5))
    (result,) = rounds(task, clients, 1)
    assert cost.refused is None
    assert (cost.exchanges, cost.bytes_up, cost.bytes_down) == (
        result.exchanges,
        result.bytes_up,
        result.bytes_down,
    )
    kept = result.client_states[0]
    assert cost.personal_bytes == sum(t.numel() * t.element_size() for t in kept.tensors.values())
    assert cost.momentum_bytes == sum(8 * t.numel() for t in kept.optimizer.values())
    if cost.calibration_bytes_up is not None:
        asked = calibrate_clients(task, result.state, {}, clients, clients.all())[1]
        assert (cost.calibration_bytes_up, cost.calibration_bytes_down) == (
            asked.bytes_up,
            asked.bytes_down,
        )


@pytest.mark.slow
def test_strategies_state_their_needs(nested):
    costs = {c.strategy: c for c in nested.strategies}
    assert [name for name, c in costs.items() if c.needs_rounds] == ["fixbn"]
    assert [name for name, c in costs.items() if not c.global_model] == ["fedbn", "silobn"]
    assert costs["fedtan"].exchanges == 3 * 6 + 1
    plain = examine("mlp", **STATIC, algorithm="fedavg", strategy={"freeze_round": 10})
    assert not any(c.momentum_bytes or c.needs_rounds for c in plain.strategies)
    refused = {c.strategy: c.refused for c in plain.strategies if c.refused}
    assert "needs convolutions" in refused["fedwon"]
    assert all("\n" not in reason for reason in refused.values())


@pytest.mark.slow
def test_distances_equal_numpy(apart):
    """A slow and obvious version of the mlp in which every batch is normalised by itself."""
    model = create_model("mlp", SHAPE, 10, 0).double()
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    seen = {"3": [], "6": []}
    for own in clients_of("gamma=0"):
        values = {"3": [], "6": []}
        for x, _ in own:
            u = x.flatten(1).numpy()
            for linear, norm in (("1", "3"), ("4", "6")):
                u = np.maximum(u @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"], 0)
                values[norm].append(u)
                u = (u - u.mean(0)) / np.sqrt(u.var(0) + 1e-5)
        for path, parts in values.items():
            seen[path].append(np.concatenate(parts))
    for layer in apart.clients.layers:
        pooled = np.concatenate(seen[layer.path])
        own = np.stack([u.var(0) for u in seen[layer.path]])
        shift = np.stack([abs(u.mean(0) - pooled.mean(0)) for u in seen[layer.path]])
        live = pooled.var(0) > 0
        assert layer.constant_channels == (~live).sum()
        bias = (1 - own.mean(0)[live] / pooled.var(0)[live]).mean()
        assert layer.bias == pytest.approx(bias, rel=1e-9)
        ratio = (own / np.where(live, pooled.var(0), 1))[:, live].mean(1)
        spread = (ratio.mean(), ratio.min(), ratio.max())
        measured = (layer.var_ratio, layer.var_ratio_min, layer.var_ratio_max)
        assert measured == pytest.approx(spread, rel=1e-9)
        expected = (shift[:, live] / pooled.std(0)[live]).mean()
        assert layer.shift == pytest.approx(expected, rel=1e-9)
        assert layer.excess == layer.bias - layer.bias_alike


@pytest.mark.slow
def test_the_gradient_of_naive_equals_plain_torch(apart):
    relative = []
    for batches in zip(*clients_of("gamma=0"), strict=True):
        central = plain_gradient(
            torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        )
        mean = torch.stack([plain_gradient(x, y) for x, y in batches]).mean(0)
        relative.append(float((mean - central).norm() / central.norm()))
    assert gradients(apart)["naive", "batch"].deviation == pytest.approx(
        np.mean(relative), rel=1e-9
    )


def plain_gradient(x, y):
    model = create_model("mlp", SHAPE, 10, 0).double().train()
    functional.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
def test_gradients_deviate_as_the_methods_say(apart):
    found = gradients(apart)
    assert found["fedtan", "exchanged"].deviation < 1e-10
    assert found["naive", "batch"].deviation > 0.1
    assert found["naive", "batch"].excess > 0.1
    assert found["fbn", "start"].deviation > found["fbn", "calibrated"].deviation
    assert found["dualbn", "calibrated"].deviation < found["fbn", "calibrated"].deviation


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_with_the_statistics_of_the_same_batch_dualbn_is_one_machine(model):
    """Up to the factor n/(n-1) of the running variance: 1/100 on the 5·20 samples of an mlp."""
    report = examine(model, partition="gamma=0", **SMALL | {"batches": 1})
    found = gradients(report)
    assert found["dualbn", "calibrated"].deviation < 0.02
    assert found["fbn", "calibrated"].deviation > 0.1
    assert found["fedtan", "exchanged"].deviation < 1e-10


@pytest.mark.slow
def test_dropout_layers_cause_no_deviation():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 10)
    )
    assert gradients(examine(model, **SMALL))["fedtan", "exchanged"].deviation < 1e-10


class Functional(nn.Module):
    """A network that drops units without a layer for it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(
            functional.dropout(self.norm(self.first(x.flatten(1))), 0.5, self.training)
        )


def test_functional_dropout_causes_no_deviation():
    assert gradients(examine(Functional(), **SMALL))["fedtan", "exchanged"].deviation < 1e-10


def test_dealing_again_keeps_samples_and_sizes():
    data = load_dataset("digits", 0)
    everyone = build_federation(data, "dirichlet_unbalanced=0.1", Plan(20), clients=6, seed=0)
    before = draw(everyone, 3)
    after = deal_again(before, 0)

    def sizes(drawn):
        return {c: [len(y) for _, y in own] for c, own in drawn.steps.items()}

    def rows(drawn):
        x = torch.cat([x for own in drawn.steps.values() for x, _ in own]).flatten(1)
        return sorted(map(tuple, x.tolist()))

    assert sizes(before) == sizes(after)
    assert rows(before) == rows(after)
    assert not torch.equal(before.steps[0][0][1], after.steps[0][0][1])


@pytest.mark.slow
def test_rarely_sampled_clients_are_counted():
    report = examine("mlp", participation=0.2, partition="gamma=0", **SMALL)
    caution = codes(report)["rarely_sampled"]
    assert caution.numbers["rounds_between"] == 5
    assert "1 of 5 clients" in caution.text


def test_without_data_nothing_is_recommended(nested):
    assert nested.clients is None
    assert nested.recommendation.strategy is None
    assert "--data" in nested.recommendation.reasons[0]
    caution = codes(nested)["server_optimizer"]
    assert caution.numbers == {"tensors": 12, "bytes": nested.state.statistics}
    assert "fixbn" in codes(nested)["needs_rounds"].text
    assert set(codes(nested)) == {"server_optimizer", "needs_rounds"}


def test_a_model_without_batch_norm_gets_a_warning():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    report = examine(model, partition="iid", **SMALL)
    taking = [c.strategy for c in report.strategies if not c.refused]
    assert "none" in taking
    assert "fbn" not in taking
    assert report.recommendation.strategy == "none"
    assert "0 of 1 normalization layers are BatchNorm" in codes(report)["no_batch_norm"].text
    assert "has no BatchNorm layers" in report.clients.unmeasured
    assert "server_optimizer" not in codes(report)


@pytest.mark.slow
def test_batches_of_one_are_named():
    report = examine("mlp", partition="iid", batch_size=1, **SMALL)
    assert report.clients.left_out == (0, 1, 2, 3, 4)
    assert report.clients.unmeasured
    assert "5 clients (0, 1, 2, 3 and 1 more)" in codes(report)["batch_of_one"].text
    assert "naive" in codes(report)["batch_of_one"].numbers["refusing"]
    few = {"partition": "dirichlet_unbalanced=0.1", "clients": 12, "data": "ring"}
    some = examine("mlp", **few, batches=1, budget=0, seed=next_seed(few))
    assert 0 < len(some.clients.left_out) < 12
    assert some.clients.layers


def next_seed(setting):
    """Return a seed that gives some client a single sample."""
    for seed in range(50):
        data = load_dataset(setting["data"], seed)
        everyone = build_federation(data, setting["partition"], Plan(20), clients=12, seed=seed)
        if any(len(part) == 1 for part in everyone.parts):
            return seed
    raise AssertionError


@pytest.mark.slow
def test_layers_that_need_care_are_named():
    shared = nn.BatchNorm1d(6)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), shared, nn.Linear(6, 6), shared,
        nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, CLASSES),
    )  # fmt: skip
    found = codes(examine(model, **STATIC, batch_size=1))
    assert found["tied"].numbers == {"layers": {"2": {"paths": 2, "calls": 2}}}
    assert found["no_running_statistics"].numbers["layers"] == ["6"]
    assert "fbn" in found["no_running_statistics"].numbers["refusing"]
    assert found["group_counts"].numbers["strategies"]["gn with 2 groups"] == {"6": 5}
    assert "all clients" in found["batch_of_one"].text
    assert codes(examine(Wild(), **STATIC))["not_reached"].numbers == {"layers": ["unused"]}


@pytest.mark.slow
def test_json_has_a_stable_schema(apart, nested, tmp_path):
    save(apart, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert list(written) == [
        "schema", "model", "layers", "state", "strategies", "warnings", "clients", "race",
        "recommendation",
    ]  # fmt: skip
    assert written["schema"] == 2
    assert [c["strategy"] for c in written["strategies"]] == list(STRATEGIES)
    assert {"strategy", "reasons", "lr", "noise", "commands"} < set(written["recommendation"])
    assert {"path", "bias", "bias_alike", "excess", "shift", "var_ratio"} <= set(
        written["clients"]["layers"][0]
    )
    assert all(set(w) == {"code", "text", "numbers"} for w in written["warnings"])
    assert json.loads(nested.to_json())["clients"] is None
    broken = replace(apart, state=replace(apart.state, total=float("nan")))
    assert json.loads(broken.to_json())["state"]["total"] is None
    with pytest.raises(ConfigError, match="cannot be written"):
        save(apart, tmp_path / "missing" / "report.json")


def call(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path):
    file = tmp_path / "out.json"
    options = ["--partition", "gamma=0", "--clients", 3, "--batches", 1, "--json", file]
    result = call("mlp", *options, "--set", "model.hidden=[8]", "--budget", 0)
    assert result.exit_code == 0, result.output
    for word in (
        "Recommendation: – there was no race",
        "1 after activation",
        "3 clients of digits",
    ):
        assert word in " ".join(result.output.split())
    report = json.loads(file.read_text())
    assert report["layers"][0]["channels"] == 8
    assert report["clients"]["clients"] == 3
    printed = call("mlp", "--shape", "5", "--classes", 3, "--json", "-")
    assert json.loads(printed.output)["model"]["shape"] == [5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnt"], "did you mean 'resnet'"),
        (["mlp", "--shape", "a,b"], "positive whole numbers"),
        (["mlp", "--shape", "4", "--data", "digits"], "either these or the data"),
        (["mlp", "--data", "digts"], "did you mean 'digits'"),
        (["mlp", "--partition", "gama=0"], "did you mean 'gamma'"),
        (["cnn", "--shape", "4"], "needs images"),
        (["mlp", "--batches", "0"], "at least 1"),
        (["mlp", "--budget", "5 days"], "a time such as 60s"),
        (["mlp", "--set", "rouns=3"], "did you mean 'rounds'"),
        (["no.such:model"], "'no.such'"),
        (["mlp", "--set", "strategies=fbn"], "every strategy"),
    ],
)
def test_mistakes_get_messages(arguments, message):
    error = call(*arguments).exception
    assert isinstance(error, ConfigError | UnknownNameError)
    assert message in str(error)


def test_a_model_that_does_not_fit_says_so():
    with pytest.raises(ConfigError, match=r"cannot be run on samples of shape \(3,\)"):
        examine(nn.Sequential(nn.Linear(64, 10)), shape=(3,))
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        examine(lambda: 3)


@pytest.mark.parametrize(
    ("model", "settings", "found"),
    [
        ("mlp", {"partition": "gamma=0"}, "fbn ended above naive (docs/choose.md)"),
        ("resnet", {"partition": "shards=0.2"}, "dualbn ended above naive (docs/choose.md)"),
        (
            "resnet",
            {"partition": "dirichlet=0.1", "algorithm": "fedavg", "local_epochs": 1},
            "alignbn and gn_ws ended above naive (docs/own-methods.md)",
        ),
        (
            "resnet",
            {"partition": "feature_shift", "algorithm": "fedavg", "local_steps": 5},
            "gn_ws (fedbn for a model each) ended above naive (docs/choose.md)",
        ),
        ("mlp", {"partition": "iid"}, ""),
        ("mlp", {"partition": "feature_shift"}, ""),
    ],
)
def test_a_study_of_such_a_setting_is_cited(model, settings, found):
    reasons = examine(model, data="digits", batches=1, budget=0, **settings).recommendation.reasons
    assert len(reasons) == 1 + bool(found)
    assert reasons[-1].endswith(f"{found}.")
    for page in re.findall(r"docs/[a-z-]+\.md", found):
        assert (Path(__file__).parents[2] / page).exists()
