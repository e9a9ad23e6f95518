"""The Flower quickstart runs with every strategy, and its README says what is so."""

import dataclasses
import importlib
import tomllib

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

import fednorm.flower
from docs.pages import ROOT, list_blocks
from fednorm.strategies import STRATEGIES, create_strategy
from flower.federation import Nodes

pytestmark = pytest.mark.flower
FOLDER = ROOT / "examples" / "flower_quickstart"
CLIENTS = 3
KEPT = {"fedbn", "silobn"}  # BatchNorm layers stay on the nodes: there is no global model


@dataclasses.dataclass
class Started:
    """What a run of the app has done."""

    grid: Nodes
    central: list[dict]  # metrics of each test at the server

    def metrics_of(self, kind):
        """Return the metrics that nodes replied to messages of a kind."""
        sent = [m for m in self.grid.sent if m.metadata.message_type.startswith(kind)]
        return [m.content["metrics"] for m in sent if m.metadata.reply_to_message_id]


@pytest.fixture
def start(monkeypatch):
    """Return a function that runs the app as it is, on nodes in this process."""
    monkeypatch.syspath_prepend(FOLDER)
    client, server = (importlib.import_module(f"quickstart.{n}_app") for n in ("client", "server"))
    settings = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["flwr"]["app"]

    def run(**changes):
        central = []
        tested = server.accuracy
        monkeypatch.setattr(server, "accuracy", lambda m: central.append(tested(m)) or central[-1])
        config = settings["config"] | changes
        places = [{"partition-id": i, "num-partitions": CLIENTS} for i in range(CLIENTS)]
        grid = Nodes(client.app, CLIENTS, places, config)
        server.app(grid, Context(7, 0, {}, RecordDict(), config))
        return Started(grid, central)

    return run


@pytest.fixture
def _few_images(start, monkeypatch):
    """Let clients train on a few of the images, which the app has loaded."""
    del start
    task = importlib.import_module("quickstart.task")
    few = dataclasses.replace(task.DATA, x=task.DATA.x[:150], y=task.DATA.y[:150])
    monkeypatch.setattr(task, "DATA", few)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_images")
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedtan"}))
def test_every_strategy_is_a_setting(start, name):
    found = start(strategy=name, **{"num-server-rounds": 1, "local-epochs": 1})
    assert len(found.central) == (2 if name not in KEPT else 0)  # before and after the round
    for kind in ("train", "evaluate"):
        assert len(found.metrics_of(kind)) == CLIENTS
    assert all(0 <= m["accuracy"] <= 1 and m["num-examples"] for m in found.metrics_of("evaluate"))
    asked = create_strategy(name).calibration == "evaluation"
    assert len(found.metrics_of("query")) == CLIENTS * asked
    assert not any(m.has_error() for m in found.grid.sent)


def test_fedtan_is_refused_with_what_to_use_instead(start):
    with pytest.raises(ValueError, match="use `fednorm run --engine flower`"):
        start(strategy="fedtan")


@pytest.mark.slow
def test_the_default_learns(start):
    found = start(**{"num-server-rounds": 8})
    assert found.central[0] < 0.3
    assert found.central[-1] > 0.7
    nodes = [m["accuracy"] for m in found.metrics_of("evaluate")]
    assert sum(nodes[-CLIENTS:]) / CLIENTS > 0.7


def test_the_example_is_short():
    files = [FOLDER / "pyproject.toml", *FOLDER.rglob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 180


def test_readme_shows_the_difference_to_plain_flower():
    (block,) = [b for b in list_blocks("diff") if b.page.startswith("examples/flower_quickstart")]
    added = [line[1:].strip() for line in block.text.splitlines() if line.startswith("+ ")]
    written = "".join(path.read_text() for path in (FOLDER / "quickstart").glob("*_app.py"))
    assert added
    assert [line for line in added if line not in written] == []


@pytest.mark.usefixtures("_few_images")
def test_parameter_groups_take_every_parameter(start, monkeypatch):
    seen = []
    plain = fednorm.flower.parameter_groups
    monkeypatch.setattr(
        fednorm.flower, "parameter_groups", lambda model, lr: seen.append(model) or plain(model, lr)
    )
    start(strategy="fixup", **{"num-server-rounds": 1, "local-epochs": 1})
    (model, *_) = seen
    groups = plain(model, lr=0.5)
    assert {group["lr"] for group in groups} == {0.5, 0.05}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
