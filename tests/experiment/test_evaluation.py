"""Personal models: of clients that have not trained yet, and on all test samples."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fednorm
from fednorm import data as data_sets
from fednorm import models
from fednorm.cli import app
from fednorm.core.messages import ClientState
from fednorm.core.task import export
from fednorm.engines.evaluation import Score
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import evaluate, measure_attack_success
from fednorm.experiment.schema.load import build_experiment
from fednorm.report.tables import fill_rows
from fednorm.report.write import write_comparison

RARELY = {
    "rounds": 3,
    "clients": 8,
    "participation": 0.25,
    "partition": "dirichlet_unbalanced=1",
    "batch_size": 8,
    "eval_every": 1,
    "dtype": "float64",
}


def last_round(strategy, **changes):
    experiment = build_experiment({**RARELY, "strategies": [strategy], "seeds": [0], **changes})
    prepared = prepare(experiment, experiment.strategies[0], 0)
    *_, result = prepared.rounds()
    return prepared, result


def forward(prepared, tensors, x):
    """Compute what the network of the run gives in evaluation mode, from its tensors alone."""
    x = x.flatten(1)
    layers = [
        (path, m) for path, m in prepared.task.model.named_modules() if not list(m.children())
    ]
    for path, module in layers:
        if isinstance(module, nn.Linear):
            x = x @ tensors[f"{path}.weight"].T + tensors[f"{path}.bias"]
        elif isinstance(module, nn.ReLU):
            x = x.clamp(min=0)
        elif f"{path}.running_mean" in tensors:
            scale = tensors[f"{path}.weight"] / (tensors[f"{path}.running_var"] + module.eps).sqrt()
            x = (x - tensors[f"{path}.running_mean"]) * scale + tensors[f"{path}.bias"]
    return x


def slow_scores(prepared, result, batches_of):
    """Oracle: every client's accuracy and loss, with mean layers where it has none of its own."""
    trained = {client: result.client_states[client].tensors for client in result.client_states}
    mean = {
        name: torch.tensor(np.mean([own[name].numpy() for own in trained.values()], axis=0))
        for name in next(iter(trained.values()))
    }
    accuracies, losses = [], []
    for client in range(prepared.experiment.clients):
        tensors = {**result.state.weights, **trained.get(client, mean)}
        batches = [(forward(prepared, tensors, x), y) for x, y in batches_of(client)]
        outputs, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        accuracies.append(float((outputs.argmax(1) == y).double().mean()))
        losses.append(float(nn.functional.cross_entropy(outputs, y)))
    return accuracies, losses


@pytest.mark.parametrize("strategy", ["fedbn", "silobn"])
def test_clients_that_have_not_trained_get_the_mean_of_the_trained_layers(strategy):
    prepared, result = last_round(strategy)
    trained = sorted(result.client_states)
    assert 2 <= len(trained) < 8
    expected, losses = slow_scores(prepared, result, prepared.federation.test)
    found = evaluate(prepared, result)
    assert found.per_client == pytest.approx(expected)
    assert found.accuracy == pytest.approx(np.mean(expected))
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-10)
    assert found.trained == pytest.approx(np.mean([expected[c] for c in trained]))
    others = [expected[c] for c in range(8) if c not in trained]
    assert found.untrained == pytest.approx(np.mean(others))


@pytest.mark.parametrize("strategy", ["fedbn", "silobn"])
def test_personal_models_are_tested_on_all_test_samples_if_asked(strategy):
    prepared, result = last_round(strategy, evaluate="global")
    data = prepared.data
    expected, losses = slow_scores(prepared, result, lambda _: [(data.x_test, data.y_test)])
    found = evaluate(prepared, result)
    assert found.per_client == pytest.approx(expected)
    assert found.accuracy == found.weighted == pytest.approx(np.mean(expected))
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-10)
    assert found.worst == min(expected)
    own = evaluate(
        replace(prepared, experiment=build_experiment({**RARELY, "strategies": [strategy]})), result
    )
    assert own.per_client != found.per_client


@pytest.mark.slow
def test_as_users_run_it_untrained_clients_are_not_at_a_loss():
    """Statistics of the start, mean 0 and variance 1, would cost tens of points."""
    work = {"algorithm": {"name": "fedavg", "lr": 0.05}, "local_epochs": 1, "dtype": "float32"}
    setting = {**RARELY, **work, "rounds": 10, "partition": "iid", "participation": 0.125}
    mean = fednorm.simulate("fedbn", **setting).history
    initial = fednorm.simulate("fedbn", unseen_init="initial", **setting).history
    early = next(i for i, found in enumerate(mean) if found.round == 5)
    assert mean[early].untrained > mean[early].trained - 0.15
    assert initial[early].untrained < mean[early].untrained - 0.1
    assert initial[early].trained == mean[early].trained


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedbn", "fbn"])
def test_where_all_have_trained_there_is_one_number(strategy):
    final = fednorm.simulate(strategy, **{**RARELY, "participation": 1.0}).final
    assert final.trained is final.untrained is None
    if strategy == "fbn":
        final = fednorm.simulate(strategy, adapt_statistics=0.5, **RARELY).final
        assert final.trained is final.untrained is None  # what is adapted is the global model


@pytest.mark.slow
def test_both_numbers_are_in_all_that_is_written(tmp_path):
    experiment = build_experiment({**RARELY, "strategies": ["fedbn"], "seeds": 1})
    comparison = run_comparison(experiment, folder=tmp_path)
    write_comparison(comparison, tmp_path)
    final = comparison.runs[0].final
    assert None not in (final.trained, final.untrained)
    both = {"trained": final.trained, "untrained": final.untrained}
    place = tmp_path / "runs" / "fedbn-seed0"
    line = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
    record = json.loads((place / "run.json").read_text())["result"]["history"][-1]
    results = json.loads((tmp_path / "results.json").read_text())["runs"][0]["final"]
    for written in (line, record, results):
        assert {key: written[key] for key in both} == both
    (row,) = fill_rows(comparison)
    note = f"({100 * final.trained:.1f} % trained, {100 * final.untrained:.1f} % untrained)"
    assert note in row["note"]
    assert note in (tmp_path / "report.html").read_text()
    assert run_comparison(experiment, folder=tmp_path).runs == comparison.runs


@pytest.mark.parametrize("strategy", ["fbn", "gn", "centralized"])
def test_a_global_model_is_tested_as_before(strategy):
    setting = {**RARELY, "rounds": 2}
    auto, asked = (fednorm.simulate(strategy, evaluate=e, **setting) for e in ("auto", "global"))
    assert auto.history == asked.history
    assert asked.final.per_client is None


def test_unseen_clients_and_adapted_models_are_tested_on_all_test_samples_too():
    prepared, result = last_round("fedbn", evaluate="global", unseen_clients=2)
    found = evaluate(prepared, result)
    data = prepared.data
    expected, _ = slow_scores(prepared, result, lambda _: [(data.x_test, data.y_test)])
    assert found.unseen == pytest.approx(np.mean(expected[6:]))
    assert found.per_client == pytest.approx(expected[:6])
    prepared, result = last_round("naive", evaluate="global", adapt_statistics=1.0)
    examples = evaluate(prepared, result)
    assert len(set(examples.per_client)) > 1
    assert examples.accuracy == pytest.approx(examples.weighted)  # all have as many samples


def test_a_backdoor_is_looked_for_in_the_layers_that_are_tested():
    threat = {"byzantine": 2, "attack": "backdoor", "partition": "iid"}
    prepared, result = last_round("fedbn", **threat, rounds=1)
    start = ClientState(
        {n: t + 1.0 for n, t in next(iter(result.client_states.values())).tensors.items()}
    )
    found = measure_attack_success(prepared, result.state, result.client_states, start)
    attack, data_info = prepared.faults.adversary.attack, prepared.data_info
    shares = []
    for client in range(8):
        if client in prepared.faults.byzantine:
            continue
        model = export(prepared.task, result.state, result.client_states.get(client, start))
        patched = attack.add_trigger(prepared.data.test_batches(), data_info)
        right = [model(x).argmax(1) == y for x, y in patched]
        shares.append(float(torch.cat(right).double().mean()))
    assert found == pytest.approx(np.mean(shares))


class Elsewhere:
    """Nodes that hold their layers, and are asked for scores."""

    ask = None

    def __init__(self):
        self.asked = []

    def get_link(self):
        return self

    def score_clients(self, state, clients, adapt):
        del state, adapt
        self.asked += clients
        return {client: Score(client / 10, 1.0, 5) for client in clients}


@pytest.mark.parametrize("newcomers", ["average", "initial"])
def test_on_nodes_untrained_clients_are_tested_as_at_the_start_or_not_at_all(newcomers):
    prepared, result = last_round("fedbn", unseen_init=newcomers)
    trained = sorted(result.client_states)
    found = evaluate(replace(prepared, remote=(nodes := Elsewhere())), result)
    if newcomers == "initial":
        assert sorted(nodes.asked) == list(range(8))
        assert found.per_client == tuple(c / 10 for c in range(8))
        assert found.trained == pytest.approx(np.mean(trained) / 10)
    else:
        assert nodes.asked == trained
        assert found.untrained is None
        assert found.accuracy == pytest.approx(np.mean(trained) / 10)


@pytest.mark.slow
def test_the_command_and_a_file_can_ask_for_it(tmp_path):
    quick = ["--rounds", "2", "--seeds", "1", "--clients", "3", "--workers", "1"]
    arguments = ["compare", *quick, "--strategies", "fedbn", "--evaluate", "global"]
    called = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a")])
    assert called.exit_code == 0, called.output
    assert 'evaluate = "global"' in (tmp_path / "a" / "config.toml").read_text()
    repeated = ["run", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "b")]
    assert CliRunner().invoke(app, repeated).exit_code == 0
    one, other = (
        json.loads((tmp_path / name / "results.json").read_text())["runs"][0]["final"]
        for name in ("a", "b")
    )
    assert one == other
    assert one["accuracy"] == pytest.approx(one["weighted"])
    help_text = CliRunner().invoke(app, ["list", "keys"], env={"COLUMNS": "200"}).output
    assert "on all test samples" in " ".join(help_text.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "heterofl", "hbn"])
def test_the_saved_model_is_the_one_that_was_tested(name, tmp_path):
    result = fednorm.simulate(name, rounds=30, clients=3, partition="gamma=0.3", out=tmp_path)
    (saved,) = tmp_path.glob("runs/*/model.safetensors")
    data = data_sets.load_dataset("digits", 0)
    model = models.create_model("mlp", data.shape, data.classes, 0).eval()
    model.load_state_dict(load_file(saved))
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).double() for x, y in data.test_batches()]
    assert float(torch.cat(right).mean()) == pytest.approx(result.final.accuracy, abs=1e-9)
