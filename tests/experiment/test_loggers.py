"""Loggers write each run into TensorBoard, W&B and MLflow: by fakes, and really if installed."""

import sys
from importlib.util import find_spec
from math import nan
from types import ModuleType
from unittest.mock import MagicMock, call

import pytest

import fednorm
from fednorm.errors import CallbackError
from fednorm.experiment.callbacks import create_callback
from fednorm.experiment.callbacks.base import RunStart
from fednorm.experiment.callbacks.loggers import list_scalars
from fednorm.experiment.results import Evaluation, Event, RunResult

SMALL = {"clients": 3, "rounds": 3, "seeds": 1, "eval_every": 2, "batch_size": 8}
SETTINGS = {"rounds": 2, "algorithm": {"name": "dsgd", "lr": 0.1}, "strategies": []}
TESTED = Evaluation(2, 0.75, 0.5, 1.5, per_client=(0.5, 1.0))
EVENTS = (
    Event("fbn", 0, 1, 2.5, exchanges=1, diagnostics={"drift": 4.0, "deviation": None}),
    Event("fbn", 0, 2, 1.5, evaluation=TESTED),
)
RESULT = RunResult("fbn", 0, "stopped early", (TESTED,), 2, 1, 1, 1, 1, stopped_by="mine")
NOTHING = {"bytes_up": 0.0, "bytes_down": 0.0}
ROUNDS = (
    {"train_loss": 2.5, **NOTHING, "exchanges": 1.0, "drift": 4.0},
    {"train_loss": 1.5, **NOTHING, "exchanges": 0.0, "accuracy": 0.75, "loss": 0.5},
)


@pytest.fixture
def package(monkeypatch):
    """Return a function that replaces a package."""

    def put(name, **attributes):
        fake = ModuleType(name)
        fake.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, fake)

    return put


def follow(callback, folder, done=0):
    callback.on_start(RunStart("fbn", 0, 2, done, settings=SETTINGS, folder=folder))
    for event in EVENTS[done:]:
        callback.on_round(event)
    callback.on_end(RESULT)


def test_only_finite_numbers_are_logged():
    assert [list_scalars(event) for event in EVENTS] == list(ROUNDS)
    assert "train_loss" not in list_scalars(Event("fbn", 0, 1, nan))


@pytest.mark.parametrize("done", [0, 1])
def test_tensorboard_gets_a_point_for_each_number(done, package, tmp_path):
    writer = MagicMock()
    package("torch.utils.tensorboard", SummaryWriter=writer)
    callback = create_callback("tensorboard")
    follow(callback, tmp_path / "fbn-seed0", done)
    writer.assert_called_once_with(
        str(tmp_path / "fbn-seed0" / "tensorboard"), purge_step=2 if done else None
    )
    points = [call(k, v, n + 1) for n in range(done, 2) for k, v in ROUNDS[n].items()]
    assert writer().add_scalar.call_args_list == points
    writer().add_text.assert_called_once_with("status", "stopped early by mine after round 2", 2)
    writer().close.assert_called_once_with()
    follow(create_callback("tensorboard", folder="logs"), None)
    assert writer.call_args == call("logs/fbn-seed0", purge_step=None)


@pytest.mark.parametrize("done", [0, 1])
def test_wandb_gets_a_run_with_steps(done, package, tmp_path):
    init = MagicMock()
    package("wandb", init=init)
    folder = tmp_path / "results" / "runs" / "fbn-seed0"
    follow(create_callback("wandb", project="mine"), folder, done)
    given = init.call_args.kwargs
    assert (given["project"], given["group"], given["name"]) == ("mine", "results", "fbn-seed0")
    assert given["config"]["algorithm"]["lr"] == 0.1
    assert given["resume"] == ("allow" if done else None)
    steps = [call(ROUNDS[n], step=n + 1) for n in range(done, 2)]
    assert init().log.call_args_list == steps
    (summary,) = init().summary.update.call_args.args
    assert summary["status"] == "stopped early by mine after round 2"
    assert summary["accuracy"] == 0.75
    init().finish.assert_called_once_with(exit_code=0)
    follow(create_callback("wandb"), None)
    assert init.call_args.kwargs["id"] is None


@pytest.mark.parametrize("done", [0, 1])
def test_mlflow_gets_parameters_and_metrics(done, package, tmp_path):
    client = MagicMock()
    client().search_runs.return_value = [MagicMock()]
    kept = client().search_runs()[0].info.run_id
    package("mlflow", MlflowClient=client)
    follow(create_callback("mlflow", uri="file:x"), tmp_path, done)
    client.assert_called_with("file:x")
    number = kept if done else client().create_run().info.run_id
    points = [
        call(number, key, value, step=n + 1)
        for n in range(done, 2)
        for key, value in ROUNDS[n].items()
    ]
    assert client().log_metric.call_args_list == points
    told = [] if done else [("strategy", "fbn"), ("seed", "0"), ("rounds", "2")]
    told += [] if done else [("algorithm.name", "dsgd"), ("algorithm.lr", "0.1")]
    assert [one.args[1:] for one in client().log_param.call_args_list] == told
    client().set_terminated.assert_called_once_with(number, "FINISHED")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_what_is_missing_is_told_before_the_first_round(name, monkeypatch):
    package = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CallbackError, match=rf"pip install \".\[{name}\]\""):
        fednorm.compare(["gn"], callbacks=[name], **SMALL)


def need(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.slow
@need("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    more = {**SMALL, "callbacks": ["tensorboard"], "out": tmp_path}
    found = fednorm.compare(["gn", "fbn"], workers=2, **more)
    for run in found.runs:
        events = EventAccumulator(str(tmp_path / f"runs/{run.strategy}-seed0/tensorboard")).Reload()
        assert [one.step for one in events.Scalars("train_loss")] == [1, 2, 3]
        seen = [(one.step, round(one.value, 5)) for one in events.Scalars("accuracy")]
        assert seen == [(one.round, round(one.accuracy, 5)) for one in run.history]


@pytest.mark.slow
@need("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_runs_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    fednorm.compare(["gn", "fbn"], callbacks=["wandb"], out=tmp_path / "o", workers=2, **SMALL)
    for name in ("gn", "fbn"):
        (log,) = (tmp_path / f"o/runs/{name}-seed0").glob("wandb/offline-run-*/run-*.wandb")
        assert b"train_loss" in log.read_bytes()


@pytest.mark.slow
@need("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_finds_the_runs_in_its_files(tmp_path, monkeypatch):
    import mlflow  # noqa: PLC0415

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    logger = {"name": "mlflow", "uri": uri, "experiment": "tests"}
    found = fednorm.compare(["gn", "fbn"], callbacks=[logger], out=tmp_path / "o", **SMALL)
    client = mlflow.MlflowClient(uri)
    (place,) = client.search_experiments(filter_string="name = 'tests'")
    runs = {run.info.run_name: run for run in client.search_runs([place.experiment_id])}
    for result in found.runs:
        run = runs[f"{result.strategy}-seed0"]
        assert run.info.status == "FINISHED"
        assert run.data.params["algorithm.name"] == "dsgd"
        points = client.get_metric_history(run.info.run_id, "accuracy")
        assert [(p.step, p.value) for p in points] == [
            (e.round, e.accuracy) for e in result.history
        ]
