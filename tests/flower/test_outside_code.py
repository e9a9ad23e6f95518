"""An experiment that was sent to a machine runs no code that the machine's owner did not allow."""

import json

import pytest
from flwr.app import Context, RecordDict

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


def test_names_of_local_runs_stay_free(tmp_path):
    values = json.loads(describe(tmp_path, model="ours.networks:build")[0])
    assert nodes.build_site(json.dumps(values), 0, 0).task
