"""The example with image folders: own folders and held-out images, saved models, plain torch."""

import importlib
import tomllib

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file, save_file

from docs.pages import ROOT
from flower.federation import Nodes

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.usefixtures("narrow_networks"),
]
FOLDER = ROOT / "examples" / "flower_hospital"
TINY = {"image-size": 32, "num-server-rounds": 1, "local-epochs": 1}


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Return a function that imports a module of the example; its images are in `images`."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "cache"))
    importlib.import_module("make_images").make_images(tmp_path / "images", share=0.1)
    return importlib.import_module


@pytest.fixture
def config(tmp_path):
    settings = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return settings["config"] | TINY | {"output": str(tmp_path / "models")}


def run(example, config, places):
    client, server = (example(f"hospital.{name}_app").app for name in ("client", "server"))
    grid = Nodes(client, len(places), places, config)
    server(grid, Context(7, 0, {}, RecordDict(), config))
    assert not any(message.has_error() for message in grid.sent)
    replies = [m for m in grid.sent if m.metadata.reply_to_message_id]
    return [m.content["metrics"] for m in replies if m.metadata.message_type == "evaluate"]


def read_models(folder):
    return {path.stem: load_file(path) for path in folder.glob("*.safetensors")}


def differ(one, other):
    return {name.rpartition(".")[2] for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("strategy", ["heterofl", "alignbn"])
def test_one_model_for_all_has_calibrated_statistics(example, config, tmp_path, strategy):
    places = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    one = {"strategy": strategy, "own-statistics": False, "data": str(tmp_path / "images")}
    metrics = run(example, config | one, places)
    assert sorted(m["num-examples"] for m in metrics) == [3, 4]  # a fifth of 12 and 24, by class
    models = read_models(tmp_path / "models")
    assert models.keys() == {"east", "north", "global"}
    assert differ(models["global"], models["east"]) == set()
    assert differ(models["global"], models["north"]) == set()
    means = [v for k, v in models["global"].items() if k.endswith("running_mean")]
    assert len(means) == 20
    assert all(mean.abs().sum() > 0 for mean in means)
    plain = example("hospital.task").build_model(config)
    plain.load_state_dict(models["global"])
    images = sorted((tmp_path / "images" / "west").rglob("*.png"))
    found = example("predict").predict(tmp_path / "models" / "global.safetensors", images)
    assert len(found) == len(images)
    assert set(found) <= {"healthy", "lesion"}


def test_a_hospital_keeps_its_statistics_and_its_model(example, config, tmp_path):
    paths = [{"data-path": str(tmp_path / "images" / name)} for name in ("east", "west")]
    run(example, config | {"own-statistics": False}, paths)
    kept = read_models(tmp_path / "models")
    assert kept.keys() == {"east", "west"}  # there is no global one
    statistics = {"running_mean", "running_var"}
    allowed = {*statistics, "num_batches_tracked"}
    assert statistics <= differ(kept["east"], kept["west"]) <= allowed


def test_a_hospital_measures_the_statistics_of_its_images(example, config, tmp_path):
    paths = [{"data-path": str(tmp_path / "images" / name)} for name in ("east", "west")]
    run(example, config, paths)
    models = read_models(tmp_path / "models")
    task = example("hospital.task")
    for name in ("east", "west"):
        data = task.load_images(tmp_path / "images" / name, config)
        plain = task.build_model(config)
        plain.load_state_dict(models[name])
        with torch.no_grad():
            seen = plain.conv1(task.normalize(data.x)).transpose(0, 1).flatten(1)
        torch.testing.assert_close(plain.bn1.running_mean, seen.mean(1), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(plain.bn1.running_var, seen.var(1), rtol=1e-3, atol=1e-4)


def test_pretrained_weights_are_loaded_except_another_classifier(example, config, tmp_path):
    task = example("hospital.task")
    trained = task.build_model(config | {"classes": "a,b,c"})
    with torch.no_grad():
        trained.conv1.weight.mul_(2)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    for name in ("trained.pt", "trained.safetensors"):
        found = task.build_model(config | {"weights": str(tmp_path / name)})
        assert torch.equal(found.conv1.weight, trained.conv1.weight)
        assert len(found.fc.weight) == 2
    save_file({"conv1.weight": trained.conv1.weight}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no ResNet-18"):
        task.build_model(config | {"weights": str(tmp_path / "other.safetensors")})


def test_a_folder_with_other_classes_is_refused(example, config, tmp_path):
    (tmp_path / "images" / "east" / "unclear").mkdir()
    with pytest.raises(ValueError, match="must hold the folders"):
        example("hospital.task").load_images(tmp_path / "images" / "east", config)
