"""An experiment that was sent to a machine runs no code that the machine's owner did not allow."""

import json

import pytest
from flwr.app import Context, RecordDict

from fednorm.engines.flower.client import _read_strategy
from fednorm.errors import ConfigError
from fednorm.experiment.flower import nodes
from fednorm.experiment.flower.server_app import server
from fednorm.experiment.schema.load import build_experiment
from flower.federation import Nodes

VALUES = {"strategies": ["fbn"], "seeds": 1, "rounds": 1, "clients": 2, "timeout": 1}
OURS = """
from os import system
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.delenv("FEDNORM_ALLOW", raising=False)
    nodes.build_site.cache_clear()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "networks.py").write_text(OURS)


def describe(tmp_path, **own):
    """Return an experiment as it is sent, and the file that its attack would write."""
    mark = tmp_path / "mark"
    attack = {"data": {"name": "os:system", "command": f"touch {mark}"}}
    sent = VALUES | {"engine": "flower"} | (own or attack)
    return build_experiment(sent).model_dump_json(), mark


def run_server(description, app, configs=None):
    grid = Nodes(app, 2, configs, {"experiment": description})
    server(grid, Context(7, 1, {}, RecordDict(), {"experiment": description}))
    return grid


def test_a_superlink_runs_no_command_of_an_experiment(tmp_path):
    description, mark = describe(tmp_path)
    with pytest.raises(ConfigError, match="allows registered names only"):
        run_server(description, nodes.client)
    assert not mark.exists()


def test_a_node_runs_no_command_of_an_experiment(tmp_path):
    description, mark = describe(tmp_path)
    context = Context(7, 9, {"partition-id": 0}, RecordDict(), {"experiment": description})
    with pytest.raises(ConfigError, match="os:system"):
        nodes._build_site(None, context, 0, 0)
    assert not mark.exists()


def hide_command(place, command):
    """Return settings that name a command where an experiment may name functions as well."""
    data = {"name": "os:system", "command": command}
    model = {"name": "ours.networks:system", "command": command}
    held_out = {"name": "fednorm.experiment.comparison:hold_out", "of": data}
    return {
        "data of a strategy": {"strategies": [{"name": "fbn", "data": data}]},
        "model of a strategy": {"strategies": ["gn", {"name": "fbn", "model": model}]},
        "held-out data": {"data": held_out},
        "held-out data of held-out data": {"data": {**held_out, "of": held_out}},
        "held-out data of a strategy": {"strategies": [{"name": "fbn", "data": held_out}]},
        "model of the reference": {"strategies": [{"name": "centralized", "model": model}]},
    }[place]


@pytest.mark.parametrize(
    "place",
    [
        "data of a strategy",
        "model of a strategy",
        "held-out data",
        "held-out data of held-out data",
        "held-out data of a strategy",
        "model of the reference",
    ],
)
@pytest.mark.parametrize("allow", ["", "fednorm", "ours.networks"])
def test_no_setting_hides_a_command(place, allow, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    description, _ = describe(tmp_path, **hide_command(place, f"touch {mark}"))
    monkeypatch.setenv("FEDNORM_ALLOW", allow)
    with pytest.raises(ConfigError, match="was sent to this machine"):
        run_server(description, nodes.client)
    context = Context(7, 9, {"allow": allow}, RecordDict(), {"experiment": description})
    with pytest.raises(ConfigError, match="was sent to this machine"):
        nodes._build_site(None, context, 0, 0)
    assert not mark.exists()


def test_an_allowed_module_is_no_door_to_what_it_imports(tmp_path):
    description, mark = describe(
        tmp_path, data={"name": "ours.networks:system", "command": f"touch {tmp_path / 'mark'}"}
    )
    context = Context(7, 9, {"allow": "ours.networks"}, RecordDict(), {"experiment": description})
    with pytest.raises(ConfigError, match="posix"):
        nodes._build_site(None, context, 0, 0)
    assert not mark.exists()


def test_owners_allow_modules_of_theirs(tmp_path, monkeypatch, capsys):
    description, _ = describe(tmp_path, model="ours.networks:build")
    monkeypatch.setenv("FEDNORM_ALLOW", "others, ours.networks")
    configs = [{"partition-id": i, "allow": "ours"} for i in range(2)]
    run_server(description, nodes.client, configs)
    assert '"status": "finished"' in capsys.readouterr().out
    # One node's owner allows nothing.
    nodes.build_site.cache_clear()
    grid = run_server(description, nodes.client, [{"partition-id": 0}, configs[1]])
    said = [m.error.reason for m in grid.failed]
    assert said
    assert all("ours.networks:build" in reason for reason in said)


CLASSES = """
import pathlib
from dataclasses import dataclass
from fednorm.aggregators.base import CoordinateRule
from fednorm.algorithms.fedavg import FedAvg
from fednorm.attacks import Attack
from fednorm.data.partition import Partition
from fednorm.strategies.fbn import FBN

pathlib.Path("mark").touch()

@dataclass(frozen=True)
class Mine(FBN):
    pass

@dataclass(frozen=True)
class Middle(CoordinateRule):
    def reduce(self, rows, scratch):
        return rows.median(0).values

@dataclass(frozen=True)
class Slow(FedAvg):
    pass
"""
NAMES = [
    {"strategies": ["outside:Mine"]},
    {"strategies": ["centralized:outside:Mine"]},
    {"strategies": ["os:system"]},
    {"strategies": [{"name": "fbn", "aggregator": "outside:Middle"}]},
    {"strategies": [{"name": "fbn", "model": "outside:Mine"}]},
    {"algorithm": {"name": "outside:Slow"}},
    {"aggregator": "nnm > outside:Middle"},
    {"statistics_aggregator": "outside:Middle"},
    {"attack": "outside:Twice", "byzantine": 0},
    {"partition": "outside:Split=0.3"},
    {"partition": "iid + outside:Split"},
    {"model": "outside:Mine"},
    {"data": "outside:Mine"},
    {"loss": "outside:Mine"},
    {"strategies": [{"name": "fbn", "loss": "outside:Mine"}]},
    {"strategies": [{"name": "fbn", "algorithm": "outside:Slow"}]},
    {"strategies": [{"name": "fbn", "attack": "outside:Twice", "byzantine": 1}], "clients": 3},
    {"strategies": [{"name": "fedfn", "base": "outside:Mine"}]},
    {"metrics": {"own": "outside:Mine"}},
]


@pytest.mark.parametrize("own", NAMES, ids=str)
def test_no_name_of_an_experiment_imports_what_is_not_allowed(tmp_path, own):
    (tmp_path / "outside.py").write_text(CLASSES)
    values = build_experiment(VALUES | {"engine": "flower"}).model_dump(mode="json") | own
    context = Context(7, 9, {"partition-id": 0}, RecordDict(), {"experiment": json.dumps(values)})
    with pytest.raises(ValueError, match="was sent to this machine, which allows registered names"):
        nodes._build_site(None, context, 0, 0)
    with pytest.raises(ValueError, match="was sent to this machine, which allows registered names"):
        run_server(json.dumps(values), nodes.client)
    assert not (tmp_path / "mark").exists()


def test_callbacks_stay_where_the_command_runs(tmp_path, capsys):
    (tmp_path / "outside.py").write_text(CLASSES)
    values = build_experiment(VALUES | {"engine": "flower"}).model_dump(mode="json")
    sent = json.dumps(values | {"callbacks": [{"name": "outside:Mine"}]})
    run_server(sent, nodes.client, [{"partition-id": i} for i in range(2)])
    assert '"status": "finished"' in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()


def test_owners_allow_strategies_of_theirs(tmp_path, monkeypatch, capsys):
    (tmp_path / "outside_allowed.py").write_text(CLASSES)
    own = {"strategies": ["outside_allowed:Mine"], "aggregator": "outside_allowed:Middle"}
    description, _ = describe(tmp_path, **own)
    monkeypatch.setenv("FEDNORM_ALLOW", "outside_allowed")
    configs = [{"partition-id": i, "allow": "outside_allowed"} for i in range(2)]
    run_server(description, nodes.client, configs)
    assert '"status": "finished"' in capsys.readouterr().out


def test_a_message_makes_no_app_import_a_strategy(tmp_path):
    (tmp_path / "outside.py").write_text(CLASSES)
    with pytest.raises(ConfigError, match="write `import outside` first"):
        _read_strategy({"strategy": json.dumps({"name": "outside:Mine"})})
    assert not (tmp_path / "mark").exists()


def test_names_of_local_runs_stay_free(tmp_path):
    values = json.loads(describe(tmp_path, model="ours.networks:build")[0])
    assert nodes.build_site(json.dumps(values), 0, 0).task
