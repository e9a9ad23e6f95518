"""Segmentation from files in Cityscapes' layout to a report, through the command line."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.data import load_dataset
from fednorm.data.datasets.cityscapes import LABELS
from fednorm.data.transforms import IGNORED

CITIES = ("aachen", "bremen", "ulm")


@pytest.fixture
def streets(tmp_path, monkeypatch):
    """Made-up scenes as files: three cities to train on, one to test on."""
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "cache"))
    root = tmp_path / "cityscapes"
    scenes = load_dataset("scenes", 0, samples=24, test=6, cities=3)
    for number, (x, y) in enumerate(zip(scenes.x, scenes.y, strict=True)):
        save(root, "train", f"{CITIES[number % 3]}_{number:06}_000019", x, y)
    for number, (x, y) in enumerate(zip(scenes.x_test, scenes.y_test, strict=True)):
        save(root, "val", f"lindau_{number:06}_000019", x, y)
    return root


def save(root, split, name, x, y):
    ids = np.array([*LABELS[:5], 0], dtype=np.uint8)
    mask = ids[np.where(y.numpy() == IGNORED, 5, y.numpy()).astype(int)]
    for folder, ending, image in (
        ("leftImg8bit", "leftImg8bit", x.permute(1, 2, 0).numpy()),
        ("gtFine", "gtFine_labelIds", mask),
    ):
        path = root / folder / split / name.split("_")[0] / f"{name}_{ending}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


@pytest.mark.slow
@pytest.mark.usefixtures("narrow_networks")
def test_cities_as_clients(streets, tmp_path):
    out = tmp_path / "out"
    command = shlex.split(
        "compare --data cityscapes --model deeplabv3plus --partition natural --clients 3 "
        "--algorithm fedavg --lr 0.05 --local-epochs 2 --rounds 4 --batch-size 4 --seeds 1 "
        "--workers 1 --strategies centralized,fixbn"
    )
    data = ["--set", f'data.root="{streets}"', "--set", "data.size=[48, 64]"]
    augmented = ["--set", "data.crop=[32, 48]", "--set", "data.augment=flip"]
    result = CliRunner().invoke(
        app, [*command, *data, *augmented, "--out", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    record = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert {run["metric"] for run in record["runs"]} == {"mean IoU"}
    assert [run["status"] for run in record["runs"]] == ["finished"] * 2
    best = {run["strategy"]: run["best_accuracy"] for run in record["runs"]}
    assert best["centralized"] > 0.1  # some of sky and road is learnt; by chance it is below 0.05
    assert "Mean IoU by round" in (out / "report.html").read_text(encoding="utf-8")
