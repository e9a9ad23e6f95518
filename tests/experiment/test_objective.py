"""Losses and metrics of the user, and data as objects, in whole runs."""

import json
import pickle
import sys
import tomllib
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm.core.targets import SAMPLE_MEANS
from fednorm.errors import ConfigError
from fednorm.experiment.flower import open_experiment
from fednorm.experiment.objective import NamedCallable, make_loss
from fednorm.experiment.run_folder import run_key
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, read_toml, to_toml
from fednorm.report.tables import fill_rows, list_columns

RNG = np.random.default_rng(0)
X = RNG.normal(size=(140, 4)).astype("float32")
LABELS, NUMBERS = (X[:, 0] > 0).astype(int), X[:, 0] - X[:, 1]
SETTINGS = {"rounds": 3, "clients": 7, "participation": 0.6, "local_epochs": 1, "seeds": 1}
SETTINGS |= {"algorithm": {"name": "fedavg", "lr": 0.05}, "batch_size": 8}


def run(strategy="naive", **settings):
    (result,) = fednorm.compare([strategy], **{**SETTINGS, **settings}).runs
    return result


def mean_absolute_error(outputs, targets):
    return (outputs - targets).abs().mean()


def huber(outputs, targets, delta=1.0):
    return functional.huber_loss(outputs, targets, delta=delta)


if X is not None:

    def guarded(outputs, targets):
        return (outputs - targets).abs().mean()


class Largest:
    """As torchmetrics has them, but not callable."""

    def __init__(self, scale=1.0):
        self.scale, self.most = scale, float("nan")

    def reset(self):
        self.most = 0.0

    def update(self, outputs, targets):
        self.most = max(self.most, float((outputs - targets).abs().max()))

    def compute(self):
        return torch.tensor(self.scale * self.most)


@pytest.mark.parametrize("strategy", ["centralized", "naive", "fbn", "dualbn", "fedbn", "gn"])
@pytest.mark.parametrize(
    ("y", "metric"), [(NUMBERS, "R²"), ((X[:, :3] > 0).astype(int), "F1"), (LABELS, "accuracy")]
)
def test_every_kind_of_target_trains(strategy, y, metric):
    result = run(strategy, data=(X, y), partition="iid", dtype="float64", rounds=2)
    assert (result.status, result.metric) == ("finished", metric)
    assert np.isfinite(result.final.accuracy)


def test_metrics_of_the_user_are_those_of_the_trained_model():
    tested = (X, NUMBERS, X[:30], NUMBERS[:30])
    result = run(data=tested, metrics={"MAE": mean_absolute_error, "most": Largest()})
    outputs = result.model()(torch.tensor(X[:30]))[:, 0].detach()
    errors = outputs - torch.tensor(NUMBERS[:30])
    assert result.final.metrics == pytest.approx(
        {"MAE": float(errors.abs().mean()), "most": float(errors.abs().max())}, rel=1e-4
    )
    spread = ((NUMBERS[:30] - NUMBERS[:30].mean()) ** 2).sum()
    r2 = 1 - float(errors.square().sum()) / spread
    assert result.final.accuracy == pytest.approx(r2, rel=1e-4)
    assert result.final.loss == pytest.approx(float(errors.square().mean()), rel=1e-4)


def test_metrics_of_personal_models_are_means_over_clients():
    part = (X[:20], NUMBERS[:20])
    one, two = (X[20:40], NUMBERS[20:40]), (X[40:50], NUMBERS[40:50])
    clients = [(part, one), (part, two)]
    common = {"clients": 2, "participation": 1}
    result = run("fedbn", data=clients, metrics=[mean_absolute_error], **common)
    single = []
    for client, (x, y) in enumerate([one, two]):
        outputs = result.model(client=client)(torch.tensor(x))[:, 0].detach()
        single.append(float((outputs - torch.tensor(y)).abs().mean()))
    assert result.final.metrics["mean_absolute_error"] == pytest.approx(np.mean(single), rel=1e-4)


def test_metrics_are_recorded_and_shown(tmp_path):
    settings = {**SETTINGS, "data": (X, NUMBERS), "metrics": [mean_absolute_error]}
    comparison = fednorm.compare(["naive", "fbn"], out=tmp_path, **settings)
    lines = (tmp_path / "runs" / "naive-seed0" / "metrics.jsonl").read_text().splitlines()
    final = comparison.runs[0].final.metrics
    assert json.loads(lines[-1])["metrics"] == final
    assert comparison.to_json()["runs"][0]["final"]["metrics"] == final
    assert list_columns(comparison)[:4] == [
        "strategy",
        "final R² %",
        "best %",
        "mean_absolute_error",
    ]
    (first, _) = fill_rows(comparison)
    assert first["mean_absolute_error"] == f"{final['mean_absolute_error']:.4g}"
    again = fednorm.compare(["naive"], out=tmp_path, **settings).runs[0]
    assert again.seconds == comparison.runs[0].seconds  # read, not run again
    assert again.final.metrics == final


@pytest.mark.parametrize(
    "other",
    [
        {"data": (X, NUMBERS + 1)},
        {"loss": nn.HuberLoss()},
        {"loss": nn.HuberLoss(delta=0.5)},
        {"metrics": [huber]},
    ],
)
def test_other_objects_never_continue_a_run(tmp_path, other):
    common = {**SETTINGS, "data": (X, NUMBERS), "loss": nn.SmoothL1Loss(), "out": tmp_path}
    fednorm.compare(["naive"], **common)
    with pytest.raises(ConfigError, match=f"with other values of {next(iter(other))};"):
        fednorm.compare(["naive"], **{**common, **other})


def test_functions_that_hold_other_values_are_others():
    def make(delta):
        return lambda outputs, targets: huber(outputs, targets, delta)

    configs = [
        fednorm.compare(["naive"], data=(X, NUMBERS), loss=make(delta), **SETTINGS).config["loss"]
        for delta in (0.5, 0.7, 0.5)
    ]
    assert configs[0] == configs[2] != configs[1]


def test_a_recorded_configuration_alone_cannot_make_an_object(tmp_path):
    fednorm.compare(["naive"], data=(X, NUMBERS), loss=huber, out=tmp_path, **SETTINGS)
    held = read_toml(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="data set 'arrays' was given as an object in Python"):
        fednorm.compare(**held)
    with pytest.raises(ConfigError, match=r"loss '.*huber' was given as an object in Python"):
        fednorm.compare(**{**held, "data": (X, NUMBERS)})


def test_settings_that_were_recorded_before_have_the_same_key():
    plain = build_experiment({"strategies": ["naive"]})
    assert not {"loss", "metrics"} & run_key(plain, plain.strategies[0], 0)["settings"].keys()
    chosen = build_experiment({"strategies": ["naive"], "loss": "torch.nn:HuberLoss"})
    assert "loss" in run_key(chosen, chosen.strategies[0], 0)["settings"]


def test_a_data_set_object_is_the_data_set():
    data = fednorm.load_dataset("ring", 0)
    given, named = (run(data=d, clients=5, partition="natural") for d in (data, "ring"))
    assert given.final == named.final


def test_a_table_with_a_name_is_no_object_and_one_with_parts_is():
    table = {"name": "digits", "test": 1500}
    assert run(data=table).tested == 1500
    parts = {"train": (X, LABELS), "test": (X[:30], LABELS[:30])}
    assert run(data=parts).tested == 30
    # A field of image data sets is called train, too.
    with pytest.raises(ConfigError, match="data set 'digits'"):
        run(data={"name": "digits", "train": 3})


def test_clients_of_objects_are_the_clients_of_the_run(tmp_path):
    parts = [(X[20 * i : 20 * i + 12 + i], LABELS[20 * i : 20 * i + 12 + i]) for i in range(7)]
    for number, (x, y) in enumerate(parts):
        (tmp_path / f"h{number}").mkdir()
        np.savez(tmp_path / f"h{number}" / "data.npz", x=x, y=y)
    settings = {key: value for key, value in SETTINGS.items() if key != "clients"}
    for data in (parts, tmp_path):
        config = fednorm.compare(["fedbn"], data=data, **settings).config
        assert (config["partition"], config["clients"]) == ("natural", 7)
    mixed = fednorm.compare(["fedbn"], data=parts, partition="iid", clients=3, **settings)
    assert mixed.config["clients"] == 3


MODULE = """
import numpy as np
from torch import nn
from torch.nn import functional

def load(seed, count=140):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, x[:, 0] - x[:, 1]

def huber(outputs, targets, delta=1.0):
    return functional.huber_loss(outputs, targets, delta=delta)

def mae(outputs, targets):
    return (outputs - targets).abs().mean()

class Largest:
    def __init__(self, scale=1.0):
        self.scale = scale
    def reset(self):
        self.most = 0.0
    def update(self, outputs, targets):
        self.most = max(self.most, float((outputs - targets).abs().max()))
    def compute(self):
        return self.scale * self.most
"""
TOML = """
strategies = ["naive"]
data = "objective_of_mine:load"
loss = { name = "objective_of_mine:huber", delta = 0.5 }
[metrics]
mae = "objective_of_mine:mae"
x10 = { name = "objective_of_mine:Largest", scale = 10.0 }
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "objective_of_mine.py").write_text(MODULE)
    (tmp_path / "mine.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_in_toml_are_the_objects_in_python(module):
    named = fednorm.compare(**read_toml(module / "mine.toml"), **SETTINGS)
    assert list(named.config["metrics"]) == ["mae", "x10"]
    data = (X, X[:, 0] - X[:, 1])  # of the same seed
    metrics = {"mae": mean_absolute_error, "x10": Largest(10.0)}
    objects = run(data=data, loss=nn.HuberLoss(delta=0.5), metrics=metrics)
    final, other = named.runs[0].final, objects.final
    assert replace(final, metrics=None) == replace(other, metrics=None)
    assert final.metrics == pytest.approx(other.metrics, rel=1e-6)


def test_a_configuration_survives_toml():
    given = {"loss": "torch.nn:HuberLoss", "metrics": "mine:f1,mine:mae"}
    experiment = build_experiment(given)
    again = build_experiment(tomllib.loads(to_toml(experiment)))
    assert again.metrics == experiment.metrics
    assert again.loss == experiment.loss


@pytest.mark.slow
def test_worker_processes_give_the_same_result(module):
    common = {"data": (X, NUMBERS), "loss": huber, "metrics": [Largest()], "partition": "iid"}
    one, two = (
        fednorm.compare(["naive", "fbn"], **SETTINGS, **common, workers=n).runs for n in (1, 2)
    )
    assert [r.final for r in one] == [r.final for r in two]
    clients = run(**common, engine="processes")
    assert clients.final == one[0].final
    named = fednorm.compare(
        **read_toml(module / "mine.toml"), **SETTINGS, engine="processes", workers=2
    )
    assert named.runs[0].status == "finished"


@pytest.mark.slow
def test_data_and_losses_given_as_objects_are_tuned(tmp_path):
    common = {**SETTINGS, "data": (X, NUMBERS), "loss": huber, "tune": {"lr": [1e-6, 0.1]}}
    tuned = fednorm.compare(["naive"], **common, out=tmp_path)
    assert tuned.chosen == {"naive": {"lr": 0.1}}


REFUSED = {
    "the mean over the batch, but returned a Tensor of shape": {
        "loss": lambda o, t: (o - t).square()
    },
    "must return one number as a tensor": {"loss": lambda o, t: float((o - t).square().mean())},
    r"loss '.*<lambda>' failed on outputs of shape \(8, 1\)": {"loss": lambda o, t: o @ t @ o},
    "'HuberLoss' is a class; give an instance": {"loss": nn.HuberLoss},
    "has parameters, which no client would train": {"loss": nn.Bilinear(1, 1, 1)},
    "a loss is 'package.module:function', such as torch.nn:HuberLoss, or a name that an "
    "installed package registers \\(none does\\), not 'huber'": {"loss": "huber"},
    "'torch.nn:HuberLoss' with {'dalta': 1}": {"loss": {"name": "torch.nn:HuberLoss", "dalta": 1}},
    "metric 'v' failed on the test samples: it must return one number": {
        "metrics": {"v": lambda o, t: o - t}
    },
    "two metrics are called 'f'": {"metrics": "one:f,two:f"},
    "workers=1": {"loss": lambda o, t: (o - t).square().mean(), "workers": 2},
    "an attack on data changes class labels": {"attack": "label_flip", "byzantine": 2},
    "data given as an object cannot be sent to nodes": {"engine": "flower"},
    "gives one number for each, but its outputs are": {
        "model": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_said_before_training(message):
    with pytest.raises(ConfigError, match=message):
        run(data=(X, NUMBERS), **REFUSED[message])


@pytest.mark.parametrize("session", [True, False])
def test_a_function_of_a_session_is_not_sent_to_workers(monkeypatch, session):
    """Those of a script are, unless they stand under its guard: workers import it again."""
    main = ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(huber, "__module__", "__main__")
    main.huber = huber
    if not session:
        main.__file__ = __file__
        fednorm.experiment.objective._check_sendable("loss", "huber", huber, workers=2)
        main.guarded = guarded
        monkeypatch.setattr(guarded, "__module__", "__main__")
    function = huber if session else guarded
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        run(data=(X, NUMBERS), loss=function, workers=2)


def test_dualbn_refuses_a_sum_and_others_are_warned(caplog):
    def total(outputs, targets):
        return (outputs - targets).square().sum()

    with pytest.raises(ConfigError, match=r"with each sample twice it is .* 'dualbn' needs a mean"):
        run("dualbn", data=(X, NUMBERS), loss=total)
    run("naive", data=(X, NUMBERS), loss=total, rounds=1)
    assert "is not a mean over the samples" in caplog.text


def test_outputs_of_one_column_fit_single_numbers():
    """torch would broadcast [n, 1] against [n], and train on the mean of all targets."""
    ours, theirs = (
        run(data=(X, NUMBERS), loss=loss, engine="loop") for loss in (None, nn.MSELoss())
    )
    assert ours.final == theirs.final


def test_own_losses_are_not_merged_or_stacked():
    experiment = Experiment(loss="torch.nn.functional:cross_entropy")
    loss = make_loss(experiment, fednorm.load_dataset("ring", 0), torch.device("cpu"))
    assert loss not in SAMPLE_MEANS
    plain = run(data=(X, LABELS), engine="loop")
    assert run(data=(X, LABELS), loss=functional.cross_entropy).final == plain.final


def test_merged_batches_are_exact_for_numbers():
    common = {"algorithm": {"name": "dsgd", "lr": 0.05}, "local_epochs": None, "participation": 1}
    common |= {"data": (X, NUMBERS), "dtype": "float64"}
    for strategy in ("naive", "fbn"):
        merged, loop = (run(strategy, engine=e, **common).final.loss for e in ("merged", "loop"))
        assert merged == pytest.approx(loop, rel=1e-12)


def test_a_node_runs_no_loss_that_its_owner_does_not_allow():
    def receive(description):
        with open_experiment(description, "mine"):
            pytest.fail("it was allowed")

    for key in ({"loss": "os:system"}, {"metrics": ["os:system"]}):
        sent = build_experiment({"strategies": ["naive"], **key}).model_dump_json()
        with pytest.raises(ConfigError, match="'os:system' was sent to this machine"):
            receive(sent)
    entry = build_experiment({"strategies": [{"name": "naive", "loss": "os:system"}]})
    with pytest.raises(ConfigError, match="loss 'os:system' was sent to this machine"):
        receive(entry.model_dump_json())


@pytest.mark.usefixtures("module")
def test_a_named_function_is_imported_anew_elsewhere():
    named = NamedCallable("loss", "objective_of_mine:huber", {"delta": 0.5})
    again = pickle.loads(pickle.dumps(named))  # noqa: S301 (our own)
    x, y = torch.ones(3), torch.zeros(3)
    assert float(again(x, y)) == float(named(x, y)) == 0.375


@pytest.mark.slow
def test_real_torchmetrics():
    found = pytest.importorskip("torchmetrics.classification", reason="an extra of the user's")
    result = run(
        data=(X, LABELS, X[:50], LABELS[:50]),
        metrics={"same": found.MulticlassAccuracy(num_classes=2, average="micro")},
    )
    assert result.final.metrics["same"] == pytest.approx(result.final.accuracy)
    named = {"name": "torchmetrics.classification:MulticlassAccuracy", "num_classes": 2}
    named |= {"average": "micro"}
    again = run(data=(X, LABELS, X[:50], LABELS[:50]), metrics={"same": named})
    assert again.final.metrics == result.final.metrics


class Parts(dict):
    """A dictionary of parts, as a DatasetDict of Hugging Face is."""


def test_a_dictionary_of_parts_is_recorded_as_what_it_is():
    part = (torch.eye(4).repeat(10, 1), torch.arange(4).repeat(10))
    given = {"data": Parts(train=part, test=part), "partition": "iid"}
    found = fednorm.compare(["naive"], **given, clients=2, rounds=1, seeds=1)
    assert found.config["data"]["name"].endswith(".Parts")
