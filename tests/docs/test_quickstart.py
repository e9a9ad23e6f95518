"""The functions in the README of the Flower quickstart do what it says of them."""

import importlib

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

import fednorm.flower
from docs.pages import ROOT, list_blocks
from flower.federation import Nodes

pytestmark = pytest.mark.flower
FOLDER = ROOT / "examples" / "flower_quickstart"
CONFIG = {"learning-rate": 0.05, "batch-size": 20, "local-steps": 2}


@pytest.fixture
def names(monkeypatch):
    """Return what the README defines."""
    monkeypatch.syspath_prepend(FOLDER)
    blocks = [b for b in list_blocks("python") if b.page.startswith("examples/flower_quickstart")]
    found = {}
    for block in blocks:
        exec(block.text, found)  # noqa: S102 (what the page says)
    return found


def run(app, strategy, model):
    places = [{"partition-id": i, "num-partitions": 10} for i in range(10)]
    arrays = ArrayRecord(model.state_dict())
    strategy.start(grid=Nodes(app, 10, places, CONFIG), initial_arrays=arrays, num_rounds=1)


def test_a_client_answers_a_calibration(names):
    train = importlib.import_module("quickstart.client_app").train
    app, asked = ClientApp(), []
    app.train()(train)

    @app.query("fednorm")
    def calibrate(message, context):
        asked.append(context.node_config["partition-id"])
        return names["calibrate"](message, context)

    model = names["Net"]()
    strategy = fednorm.flower.NormStrategy("heterofl", model=model, fraction_evaluate=0.0)
    run(app, strategy, model)
    assert sorted(asked) == list(range(10))
    means = [m.running_mean for m in strategy.model.modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(means) == 2
    assert all(mean.abs().sum() > 0 for mean in means)


def test_the_optimizer_takes_every_parameter(names):
    app, rates = ClientApp(), []

    @app.train()
    def train(message, context):
        model = fednorm.flower.unpack(message, names["Net"](), context)
        groups = names["make_optimizer"](model).param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        rates.extend(group["lr"] for group in groups)
        with torch.no_grad():
            model(torch.zeros(2, 1, 8, 8))
        return fednorm.flower.pack(model, message, context, examples=1)

    model = names["Net"]()
    run(app, fednorm.flower.NormStrategy("fbn", model=model, fraction_evaluate=0.0), model)
    assert set(rates) == {0.1}
