"""Checkpoints, models and records that others made: a sentence for each, whatever is in them."""

import json
import math
import os
import shutil
from hashlib import sha256

import pytest
import safetensors.torch
import torch

import fednorm
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import load_comparison, run_comparison
from fednorm.experiment.extension import extend_folder
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from fednorm.report.join import load_figure
from fednorm.report.write import write_comparison

VALUES = {"strategies": ["fedbn"], "seeds": 1, "rounds": 4, "clients": 2, "model": "mlp"}


@pytest.fixture
def stopped(tmp_path):
    """Return the folder of a run that stopped after two rounds, and its checkpoint."""

    def stop(event):
        if event.round == 2:
            raise KeyboardInterrupt

    run_comparison(
        build_experiment(VALUES),
        folder=tmp_path,
        monitor=Monitor([stop]),
        saving=CheckpointPolicy(every=1),
    )
    folder = tmp_path / "runs" / "fedbn-seed0"
    (newest, *_) = sorted(folder.glob("checkpoint-*"), reverse=True)
    return tmp_path, newest


def read(path):
    with safetensors.safe_open(path, "pt") as file:
        return json.loads(file.metadata()["run"]), {
            k: file.get_tensor(k) for k in list(file.keys())
        }


def write(path, header, tensors):
    """Write a checkpoint with the checksum of its content in its name."""
    text = header if isinstance(header, str) else json.dumps(header)
    content = safetensors.torch.save(tensors, {"run": text})
    path.unlink()
    path = path.with_name(f"checkpoint-00000009-{sha256(content).hexdigest()}.safetensors")
    path.write_bytes(content)
    return path


def shrink(header, tensors):
    return header, {key: torch.zeros(1) for key in tensors}


def other_type(header, tensors):
    return header, {key: value.to(torch.int8) for key, value in tensors.items()}


def change(**content):
    return lambda header, tensors: ({**header, **content}, tensors)


OTHERS = {
    "shapes": shrink,
    "types": other_type,
    "no tensors": lambda header, _: (header, {}),
    "no state": change(state={}),
    "a number": change(state={"value": 3}),
    "no record": change(record={}),
    "another record": change(record={"history": 3}),
    "clients": change(client_states={"x": {"value": 1}}),
    "unknown client": change(client_states={"77": {"map": {}}}),
    "windows": change(window=[]),
    "no JSON": lambda _, tensors: ("{", tensors),
    "a list": lambda _, tensors: ("[]", tensors),
    "deep": lambda _, tensors: ("[" * 100_000 + "]" * 100_000, tensors),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_with_other_content_is_not_used(stopped, kind, caplog):
    folder, path = stopped
    for old in path.parent.glob("checkpoint-*"):
        if old != path:
            old.unlink()
    write(path, *OTHERS[kind](*read(path)))
    (run,) = run_comparison(build_experiment(VALUES), folder=folder).runs
    assert (run.status, run.rounds) == ("finished", 4)
    assert "is damaged" in caplog.text


def test_the_checkpoint_before_is_used(stopped, caplog):
    folder, path = stopped
    write(path, *shrink(*read(path)))
    rounds = []
    monitor = Monitor([lambda event: rounds.append(event.round)])
    run_comparison(build_experiment(VALUES), folder=folder, monitor=monitor)
    assert rounds == [2, 3, 4]
    assert "is damaged" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(stopped, kind):
    folder, path = stopped
    path = path.rename(path.with_name(path.name.replace("-0000", "-1000")))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert run_comparison(build_experiment(VALUES), folder=folder).runs[0].status == "finished"


@pytest.fixture
def model(tmp_path):
    """Return the file of a trained model."""
    run_comparison(build_experiment(VALUES), folder=tmp_path)
    return tmp_path / "runs" / "fedbn-seed0" / "model.safetensors"


MADE = {
    "dtype": {"dtype": "load"},
    "size": {"settings": {"hidden": [10**12]}},
    "settings": {"settings": {"nothing": 1}},
    "strategy": {"strategy": "os:system"},
    "fields": {"fields": {"stats_momentum": "x"}},
    "shape": {"shape": ["a"]},
    "large shape": {"shape": [10**9, 10**9]},
    "classes": {"classes": -1},
    "model": {"model": "os:system"},
    "no fields": {"fields": None},
    "no name": {"strategy": 3},
    "a list of models": {"model": []},
    "personal keys": {"personal": [[1]]},
    "another key": {"nothing": 1},
    "a list": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_a_model_with_another_header_is_refused(model, kind):
    with safetensors.safe_open(model, "pt") as file:
        header = json.loads(file.metadata()["fednorm"])
        tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    header = {**header, **MADE[kind]} if MADE[kind] else []
    model.write_bytes(safetensors.torch.save(tensors, {"fednorm": json.dumps(header)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        fednorm.load(model, client=0)


def test_a_damaged_file_of_a_client_is_refused(model):
    own = model.parent / "clients" / "0.safetensors"
    (own.parent / "notes.safetensors").write_bytes(b"")  # no client's
    own.write_bytes(own.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"0\.safetensors.*is not an intact safetensors file"):
        fednorm.load(model, client=0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder whose run ended with an evaluation that a longer run would not make."""
    folder = tmp_path_factory.mktemp("finished")
    settings = {**VALUES, "strategies": ["fbn"], "eval_every": 3}
    write_comparison(run_comparison(build_experiment(settings), folder=folder), folder)
    return folder


def alter(path, *keys, value):
    """Set a value deep inside of a JSON file."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("result",), -1),
        (("result", "history", 0, "round"), [[1]]),
        (("result", "history", 0, "accuracy"), {}),
        (("result", "rounds"), "many"),
        (("result", "frozen_from"), [None]),
        (("result", "strategy"), ["fbn"]),
        (("result", "strategy"), "gn"),
        (("result", "seed"), 7),
        (("result", "metric"), True),
        (("result", "delta"), "x"),
    ],
    ids=str,
)
def test_a_result_of_other_types_is_not_read(finished, tmp_path, keys, value):
    copy = shutil.copytree(finished, tmp_path / "copy")
    alter(copy / "runs" / "fbn-seed0" / "run.json", *keys, value=value)
    assert load_comparison(copy).missing == ("fbn seed 0",)


def nest(path):
    path.write_text("[" * 100_000 + "]" * 100_000)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [nest, pipe])
def test_records_that_cannot_be_read_are_left_out(finished, tmp_path, damage):
    copy = shutil.copytree(finished, tmp_path / "copy")
    damage(copy / "results.json")
    found = load_comparison(copy)
    assert (len(found.runs), found.environment, found.label_counts) == (1, {}, ())
    damage(copy / "runs" / "fbn-seed0" / "run.json")
    assert load_comparison(copy).missing == ("fbn seed 0",)


@pytest.mark.parametrize(
    ("key", "value"), [("label_counts", [["x"]]), ("label_counts", 3), ("environment", ["x"])]
)
def test_what_a_record_tells_of_other_types_is_not_shown(finished, tmp_path, key, value):
    copy = shutil.copytree(finished, tmp_path / "copy")
    alter(copy / "results.json", key, value=value)
    found = load_comparison(copy)
    assert (found.environment, found.label_counts) == ({}, ())


@pytest.mark.parametrize(
    "record",
    [
        {"panels": 3},
        {"panels": [3]},
        {"panels": [{"title": ["a"]}]},
        {"panels": [{"title": "a", "published": {"fbn": "x"}}]},
        {"panels": [], "cuts": 3},
        {"panels": [], "heat": ["a"]},
    ],
    ids=str,
)
def test_a_figure_of_other_types_is_none(tmp_path, record):
    (tmp_path / "results.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="holds no experiment"):
        load_figure(tmp_path)


def extend(folder):
    return extend_folder(folder, build_experiment({**VALUES, "strategies": ["fbn"], "rounds": 6}))


RECORDS = {
    "nothing": {},
    "a number": 3,
    "no history": {"history": 3},
    "texts": {"history": ["x"]},
    "no round": {"history": [{}]},
    "no exchanges": {"exchanges": []},
    "freezing": {"frozen_from": "x"},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_checkpoint_with_another_record_is_not_extended(finished, tmp_path, kind):
    copy = shutil.copytree(finished, tmp_path / "copy")
    (path,) = (copy / "runs" / "fbn-seed0").glob("checkpoint-*")
    header, tensors = read(path)
    new = RECORDS[kind]
    header["record"] = {**header["record"], **new} if isinstance(new, dict) and new else new
    write(path, header, tensors)
    with pytest.raises(ConfigError, match="fbn seed 0 cannot be extended"):
        extend(copy)


@pytest.mark.parametrize("content", [None, b"", b"{\n" * 4, b"\xff\n" * 4, b"3\n" * 4], ids=str)
def test_runs_whose_rounds_cannot_be_read_are_not_extended(finished, tmp_path, content):
    copy = shutil.copytree(finished, tmp_path / "copy")
    path = copy / "runs" / "fbn-seed0" / "metrics.jsonl"
    path.write_bytes(content) if content is not None else path.unlink()
    before = (copy / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be extended.*metrics\.jsonl"):
        extend(copy)
    assert (copy / "config.toml").read_bytes() == before


def test_an_accuracy_that_is_no_number_is_read_as_one(finished, tmp_path):
    """R² of outputs that are infinite is one."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    alter(copy / "runs" / "fbn-seed0" / "run.json", "result", "history", -1, "accuracy", value=None)
    found = load_comparison(copy)
    assert math.isnan(found.runs[0].final.accuracy)
    assert found.summaries()[0].accuracy is None
    write_comparison(found, tmp_path)
