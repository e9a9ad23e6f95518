"""What `--diagnose` records, against slow versions of the same."""

import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fednorm
from fednorm.algorithms.dsgd import DSGD
from fednorm.algorithms.fedavg import FedAvg
from fednorm.cli import app
from fednorm.core.messages import LayerStats, RejectedReply, Reply, RunningStats
from fednorm.core.moments import Moments
from fednorm.engines import loop
from fednorm.experiment.callbacks.base import Callback
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.diagnostics import (
    WINDOW,
    Diagnosis,
    batch_statistics,
    batch_vector,
    central_gradient,
    deviation,
    distance,
    drift,
    mean_gradient,
    mean_variance,
    move_window,
    window_bytes,
)
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, nested_model, task_of

KEYS = {
    "drift",
    "deviation",
    "statistics_variance",
    "gradient_deviation",
    "bytes_up",
    "bytes_down",
    "exchanges",
}
QUICK = {"rounds": 4, "seeds": 1, "clients": 3, "eval_every": 2}


def plain_model(state, *, train):
    """Return torch's own model with the weights and statistics of a state."""
    model = nested_model()
    running = {
        f"{path}.{name}": value
        for path, r in state.running.items()
        for name, value in (("running_mean", r.mean), ("running_var", r.var))
    }
    model.load_state_dict({**state.weights, **running}, strict=False)
    return model.train(train)


def seen_by_layers(model, x):
    """Return mean and unbiased variance of the input of every BatchNorm layer."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):

            def look(_module, inputs, path=path):
                values = inputs[0].detach().transpose(0, 1).flatten(1)
                found[path] = values.mean(1), values.var(1)

            module.register_forward_pre_hook(look)
    model(x)
    return found


def slow_drift(before, after):
    total = 0.0
    for path, old in before.running.items():
        new = after.running[path]
        total += sum(abs(a - b) for a, b in zip(new.mean.tolist(), old.mean.tolist(), strict=True))
        total += sum(abs(a - b) for a, b in zip(new.var.tolist(), old.var.tolist(), strict=True))
    return total


def slow_deviation(before, batches, *, train):
    distances = []
    for x, _ in batches:
        seen = seen_by_layers(plain_model(before, train=train), x)
        distances.append(
            sum(
                float((mean - before.running[p].mean).abs().sum())
                + float((var - before.running[p].var).abs().sum())
                for p, (mean, var) in seen.items()
            )
        )
    return fmean(distances)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "train"),
    [
        ("fbn", {}, False),
        ("fbn", {"statistics": "average"}, False),
        ("naive", {}, True),
        ("naive", {"stats_momentum": None}, True),
        ("naive", {"statistics": "pool"}, True),
    ],
)
def test_drift_and_deviation_are_what_a_slow_look_at_the_states_finds(name, fields, train):
    toy = ToyClients(sizes=(4, 7, 5))
    task = task_of(name, DSGD(lr=0.1), **fields)
    before = task.initial_state
    for result in loop.rounds(task, toy, 3):
        batches = [toy.batches(client, before.round + 1).steps[0] for client in toy.all()]
        moved = drift(task, before, result.state)
        assert moved > 0.1
        assert moved == pytest.approx(slow_drift(before, result.state), rel=1e-10)
        apart = deviation(task, before, result.replies)
        assert apart == pytest.approx(slow_deviation(before, batches, train=train), rel=1e-7)
        before = result.state


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_statistics_are_recovered_from_running_ones_over_several_steps(momentum):
    task = task_of("naive", FedAvg(), stats_momentum=momentum)
    path = next(iter(task.layout.sharing))
    channels = len(task.initial_state.running[path].mean)
    steps = [torch.full((channels,), float(value)) for value in (1, 2, 4)]
    running = torch.zeros(channels)
    shares = []
    for number, value in enumerate(steps, start=3):
        rate = 1 / number if momentum is None else momentum
        running = (1 - rate) * running + rate * value
        shares = [share * (1 - rate) for share in shares] + [rate]
    expected = sum(s * v for s, v in zip(shares, steps, strict=True)) / sum(shares)
    start = RunningStats(torch.zeros(channels), torch.zeros(channels), num_batches=2)
    before = replace(task.initial_state, running={path: start})
    report = LayerStats(Moments(3.0, running, 2 * running), num_batches=5)
    reply = Reply(0, examples=1, update={}, buffers={}, stats={path: report})
    mean, var = batch_statistics(task, before, path, reply)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(var, 2 * expected)


def test_backward_means_are_no_statistics():
    task = task_of("dualbn", DSGD(lr=0.1))
    result = next(loop.rounds(task, ToyClients(), 1))
    paths = {name for name in task.initial_state.running if not name.endswith("backward_means")}
    assert len(paths) < len(task.initial_state.running)
    before, after = (
        replace(s, running={p: s.running[p] for p in paths})
        for s in (task.initial_state, result.state)
    )
    found = drift(task, task.initial_state, result.state)
    assert found == pytest.approx(slow_drift(before, after), rel=1e-10)


def gradient_of(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    return dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        )
    )


ALGORITHMS = [
    DSGD(lr=0.1),
    DSGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    FedAvg(lr=0.1, weight_decay=0.01, schedule="step"),
    FedAvg(lr=0.1, momentum=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["naive", "fbn", "fedtan"])
def test_gradients_against_plain_torch(name, algorithm):
    toy = ToyClients(sizes=(4, 7, 5), absent={1: (2,)})  # one has no momentum in round 2
    task = task_of(name, algorithm, count=3)
    before, client_states = task.initial_state, {}
    for result in loop.rounds(task, toy, 3):
        number = before.round + 1
        expected = gradient_of(plain_model(before, train=True), *toy.union(number))
        assert_close(central_gradient(task, before, toy), expected)
        if name != "fedtan":
            here = toy.participants(number)
            batches = [toy.batches(client, number).steps[0] for client in here]
            model = plain_model(before, train=name == "naive")
            running = {key: value.clone() for key, value in model.named_buffers()}
            own = []
            for batch in batches:
                model.load_state_dict(running, strict=False)
                own.append(gradient_of(model, *batch))
            sizes = [toy.sizes[client] for client in here]
            expected = {
                key: sum(n * g[key] for n, g in zip(sizes, own, strict=True)) / sum(sizes)
                for key in expected
            }
        assert_close(mean_gradient(task, before, client_states, result.replies), expected)
        before, client_states = result.state, dict(result.client_states)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)


def test_the_distance_of_gradients_is_relative():
    reference = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([1.0, 4.0])}
    assert distance(gradient, reference) == pytest.approx(0.2)
    assert distance({"a": gradient["a"]}, reference) == 0
    assert distance(gradient, {k: 0 * v for k, v in reference.items()}) is None


def diagnosed(strategy, **changes):
    """Run a few rounds and return what each of them showed."""
    values = {**QUICK, "strategies": [strategy], "diagnose": True, "dtype": "float64", **changes}
    return fednorm.compare(**values).runs[0].diagnostics


PLAIN = {"name": "dsgd", "lr": 0.05, "momentum": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PLAIN, {**PLAIN, "momentum": 0.9}])
def test_the_gradient_of_fedtan_is_the_centralized_one_and_that_of_naive_is_not(algorithm):
    setting = {"clients": 5, "partition": "gamma=0", "algorithm": algorithm}
    exact = [d["gradient_deviation"] for d in diagnosed("fedtan", **setting)]
    wrong = [d["gradient_deviation"] for d in diagnosed("naive", **setting)]
    assert exact[0] is exact[2] is None  # rounds without an evaluation
    assert max(exact[1], exact[3]) < 1e-6
    assert min(wrong[1], wrong[3]) > 0.1


class Dropping(nn.Module):
    """Drops units by layers and by functions; `coin` draws once for the whole batch."""

    def __init__(self, *, coin=False):
        super().__init__()
        self.coin = coin
        self.first, self.norm, self.drop = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.second, self.last = nn.Linear(16, 12), nn.Linear(12, 10)
        self.again = nn.BatchNorm1d(12)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x.flatten(1))).relu())
        x = nn.functional.dropout(self.again(self.second(x)), 0.25, self.training)
        return self.last(x * torch.rand(()) if self.coin and self.training else x)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedtan", "centralized"])
@pytest.mark.parametrize("partition", ["gamma=0", "dirichlet_unbalanced=0.5"])
def test_dropout_is_no_deviation_of_gradients(strategy, partition):
    setting = {"model": Dropping(), "partition": partition, "algorithm": PLAIN, "batch_size": 40}
    found = diagnosed(strategy, eval_every=1, **setting)
    assert all(d["gradient_deviation"] <= 1e-10 for d in found)


@pytest.mark.slow
def test_dropout_is_no_deviation_of_gradients_as_users_run_it():
    setting = {"clients": 6, "participation": 0.5, "dtype": "float32", "eval_every": 1}
    model = {"name": "fbn_cnn", "dropout": 0.25}
    exact = diagnosed("fedtan", model=model, rounds=2, **setting)
    # Rounding turns some ReLUs and maxima the other way; other masks would be 0.4.
    assert all(d["gradient_deviation"] <= 0.05 for d in exact)
    naive = diagnosed("naive", model=model, rounds=2, **setting)
    assert all(d["gradient_deviation"] > 0.1 for d in naive)


def test_masks_of_the_reference_leave_the_run_as_it_is():
    setting = {**QUICK, "model": Dropping(), "engine": "loop"}
    on, off = (fednorm.compare(["fbn"], diagnose=d, **setting).runs[0] for d in (True, False))
    assert on.history == off.history


def test_a_model_that_draws_for_no_sample_has_no_gradient_deviation():
    found = diagnosed("fedtan", model=Dropping(coin=True), eval_every=1)
    assert [d["gradient_deviation"] for d in found] == [None] * 4
    assert found[-1]["deviation"] > 0


def test_one_machine_has_no_gradient_deviation_and_sends_nothing():
    last = diagnosed("centralized")[-1]
    assert last["gradient_deviation"] < 1e-9
    assert (last["bytes_up"], last["bytes_down"], last["exchanges"]) == (0, 0, 0)
    assert last["deviation"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes", "absent"),
    [
        ("gn", {}, {"drift", "deviation", "gradient_deviation"}),
        ("fedbn", {}, {"drift", "deviation", "gradient_deviation"}),
        ("silobn", {}, {"drift", "deviation"}),
        ("switchnorm", {}, {"gradient_deviation"}),
        ("fbn", {"algorithm": "fedavg", "local_steps": 2}, {"gradient_deviation"}),
        ("fbn", {"algorithm": "fedavg", "local_epochs": 1}, {"gradient_deviation"}),
        ("fbn", {"clients": 1, "batch_size": 1}, {"gradient_deviation"}),
        (
            "fbn",
            {"algorithm": {"name": "fedavg", "momentum": 0.5, "momentum_state": "local"}},
            {"gradient_deviation"},
        ),
        ("fixbn", {}, {"deviation"}),
    ],
)
def test_what_makes_no_sense_is_none(strategy, changes, absent):
    last = diagnosed(strategy, **changes)[-1]
    assert set(last) == KEYS
    expected = {"drift", "deviation", "gradient_deviation"} - absent
    assert {key for key in KEYS if last[key] is None} >= absent
    assert all(last[key] is not None for key in expected)


@pytest.mark.slow
def test_stage_two_of_fixbn_has_no_drift():
    found = diagnosed({"name": "fixbn", "freeze_round": 3}, rounds=WINDOW + 6, eval_every=500)
    assert [d["drift"] > 0 for d in found[:3]] == [True] * 3
    assert [d["drift"] for d in found[3:]] == [0.0] * (WINDOW + 3)
    # What was seen before stays in the window for as long as that lasts.
    assert found[2]["statistics_variance"] == found[WINDOW - 1]["statistics_variance"] > 0
    assert found[WINDOW + 1]["statistics_variance"] is None  # one report is left of each client


def slow_variance(history, end, length):
    """Return what numpy finds in a list of (round, client, vector), client by client."""
    found = []
    for client in {client for _, client, _ in history}:
        rows = [v for t, c, v in history if c == client and end - length < t <= end]
        if len(rows) > 1:
            found.append(np.var(np.stack(rows), axis=0).sum())
    return np.mean(found) if found else None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train"), [("naive", True), ("fbn", False)])
def test_the_variance_of_statistics_is_that_of_each_clients_batches_over_a_window(name, train):
    toy = ToyClients(
        sizes=(4, 7, 5), absent={2: (1,), 3: (1,), 5: (0, 1), 6: (1,), 7: (1,), 8: (1,)}
    )
    task = task_of(name, DSGD(lr=0.1))
    before, history, window = task.initial_state, [], {}
    for result in loop.rounds(task, toy, 12):
        number = result.state.round
        for client in toy.participants(number):
            x, _ = toy.batches(client, number).steps[0]
            seen = seen_by_layers(plain_model(before, train=train), x)
            vector = torch.cat([part for of_layer in seen.values() for part in of_layer])
            history.append((number, client, vector.numpy()))
        new = {reply.client: batch_vector(task, before, reply) for reply in result.replies}
        window = move_window(window, number, new, length=4)
        expected = slow_variance(history, number, 4)
        assert mean_variance(window) == (expected and pytest.approx(expected, rel=1e-7))
        before = result.state
    assert sorted(window) == [0, 1, 2]
    assert window[1].rounds.tolist() == [9, 10, 11, 12]


@pytest.mark.slow
def test_the_window_lasts_two_hundred_rounds_as_users_run_it():
    setting = {"clients": 5, "participation": 0.4, "partition": "dirichlet_unbalanced=0.5"}
    work = {"algorithm": {"name": "fedavg", "lr": 0.05}, "local_epochs": 1, "data": "patterns"}
    values = {**setting, **work, "rounds": 212, "seeds": 1, "batch_size": 60, "eval_every": 1000}
    experiment = build_experiment({**values, "strategies": ["naive"], "diagnose": True})
    prepared = prepare(experiment, experiment.strategies[0], 0)
    diagnosis, history = Diagnosis(prepared), []
    for result in prepared.rounds():
        for reply in result.replies:
            vector = batch_vector(prepared.task, diagnosis.before, reply)
            history.append((result.state.round, reply.client, vector.double().numpy()))
        found = diagnosis.measure_round(result, gradient=False)["statistics_variance"]
        if result.state.round in {1, 2, 3, 199, 200, 201, 212}:
            expected = slow_variance(history, result.state.round, 200)
            assert found == (expected and pytest.approx(expected, rel=1e-9))
    assert sum(len(seen.rounds) for seen in diagnosis.window.values()) == 400
    held = sum(seen.vectors.nbytes for seen in diagnosis.window.values())
    assert held == window_bytes(prepared)


def test_a_large_mean_takes_no_digits_from_the_variance():
    window = {}
    for round_, value in enumerate((1.0, 2.0, 4.0), start=1):
        window = move_window(window, round_, {3: torch.tensor([1e6 + value, 7.0])})
    assert mean_variance(window) == pytest.approx(np.var([1, 2, 4]), rel=1e-12)


def test_a_layer_that_reports_nothing_takes_no_part_in_the_variance():
    values = {**QUICK, "strategies": ["fbn"], "diagnose": True}
    prepared = prepare(experiment := build_experiment(values), experiment.strategies[0], 0)
    result = next(prepared.rounds())
    task, before, reply = prepared.task, prepared.task.initial_state, result.replies[0]
    path = next(iter(reply.stats))
    whole = batch_vector(task, before, reply)
    silent = replace(reply, stats={p: r for p, r in reply.stats.items() if p != path})
    partial = batch_vector(task, before, silent)
    channels = len(before.running[path].mean)
    assert partial[: 2 * channels].isnan().all()
    assert torch.equal(partial[2 * channels :], whole[2 * channels :])
    assert batch_vector(task, before, replace(reply, stats={})) is None
    window = move_window({}, 1, {0: partial})
    window = move_window(window, 2, {0: 3 * partial})
    expected = np.var(np.stack([partial, 3 * partial])[:, 2 * channels :], axis=0).sum()
    assert mean_variance(window) == pytest.approx(expected, rel=1e-6)


def test_rejected_replies_do_not_count():
    values = {**QUICK, "strategies": ["fbn"], "diagnose": True}
    prepared = prepare(experiment := build_experiment(values), experiment.strategies[0], 0)
    result = next(prepared.rounds())
    path, report = next(iter(result.replies[0].stats.items()))
    wild = replace(report, moments=replace(report.moments, mean=report.moments.mean + 1e6))
    first = replace(result.replies[0], stats={**result.replies[0].stats, path: wild})
    bad = replace(
        result,
        replies=[first, *result.replies[1:]],
        state=replace(result.state, rejected=(RejectedReply(0, "out of its mind"),)),
    )
    found = Diagnosis(prepared).measure_round(bad, gradient=False)["deviation"]
    rest = deviation(prepared.task, prepared.task.initial_state, result.replies[1:])
    assert found == pytest.approx(rest)


def lines(folder, name):
    text = (folder / "runs" / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_metrics_carry_the_keys_and_the_run_is_that_of_the_loop(tmp_path):
    base = {**QUICK, "strategies": ["centralized", "fbn"]}
    on = run_comparison(build_experiment({**base, "diagnose": True}), folder=tmp_path / "on")
    off = run_comparison(build_experiment({**base, "engine": "loop"}), folder=tmp_path / "off")
    assert [r.history for r in on.runs] == [r.history for r in off.runs]
    for run in on.runs:
        name = f"{run.strategy}-seed0"
        with_keys, without = lines(tmp_path / "on", name), lines(tmp_path / "off", name)
        assert len(with_keys) == len(run.diagnostics) == 4
        for line, plain, found in zip(with_keys, without, run.diagnostics, strict=True):
            assert {key: line[key] for key in KEYS} == found
            assert {k: v for k, v in line.items() if k not in KEYS} == plain
        assert with_keys[1]["gradient_deviation"] is not None
    assert all(run.diagnostics == () for run in off.runs)
    assert on.runs[1].diagnostics[0]["bytes_up"] == on.runs[1].bytes_up_per_round


def test_a_diagnosed_run_is_made_in_the_loop():
    for diagnose, engine in ((False, "merged"), (True, "loop")):
        experiment = build_experiment({**QUICK, "strategies": ["fbn"], "diagnose": diagnose})
        assert prepare(experiment, experiment.strategies[0], 0).engine.name == engine


class Skips(Callback):
    """Collects the runs that a folder holds already."""

    def __init__(self):
        self.results = []

    def on_skip(self, result):
        self.results.append(result)


def test_a_recorded_run_has_its_diagnostics_and_results_json_has_not(tmp_path):
    experiment = build_experiment({**QUICK, "strategies": ["fbn"], "diagnose": True})
    first = run_comparison(experiment, folder=tmp_path)
    skips = Skips()
    again = run_comparison(experiment, folder=tmp_path, monitor=Monitor([skips]))
    assert again.runs == first.runs
    assert len(skips.results) == 1
    assert "diagnostics" not in first.runs[0].to_json()


def test_runs_recorded_without_knowing_of_diagnostics_are_still_good(tmp_path):
    experiment = build_experiment({**QUICK, "strategies": ["fbn"]})
    first = run_comparison(experiment, folder=tmp_path)
    path = tmp_path / "runs" / "fbn-seed0" / "run.json"
    content = json.loads(path.read_text())
    assert "diagnose" not in content["key"]["settings"]
    del content["result"]["diagnostics"]
    path.write_text(json.dumps(content))
    skips = Skips()
    again = run_comparison(experiment, folder=tmp_path, monitor=Monitor([skips]))
    assert again.runs == first.runs
    assert len(skips.results) == 1


@pytest.mark.slow
def test_the_command_has_a_flag(tmp_path):
    quick = ["--rounds", "2", "--seeds", "1", "--clients", "3", "--workers", "1"]
    arguments = ["compare", *quick, "--strategies", "fbn", "--diagnose", "--out", str(tmp_path)]
    called = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert called.exit_code == 0, called.output
    assert set(lines(tmp_path, "fbn-seed0")[0]) >= KEYS
    assert "Diagnostics" in (tmp_path / "report.html").read_text()
    assert "diagnose = true" in (tmp_path / "config.toml").read_text()


def test_diagnostics_that_are_off_cost_nothing(monkeypatch):
    def fail(*_):
        pytest.fail("a diagnosis was made")

    monkeypatch.setattr("fednorm.experiment.run.Diagnosis", fail)
    assert fednorm.simulate("fbn", rounds=2, clients=3).diagnostics == ()
