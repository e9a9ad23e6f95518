"""Experiments on Flower's simulation runtime: the very result of the simulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from typer.testing import CliRunner

from fednorm.cli import app as command_line
from fednorm.errors import ConfigError, SimulationError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.flower.nodes import start_simulation
from fednorm.experiment.schema.load import build_experiment

# Unequal clients whose layers and momentum stay with them.
VALUES = {
    "strategies": ["fedbn"], "seeds": 1, "rounds": 2, "clients": 3, "eval_every": 1,
    "data": {"name": "patterns", "samples": 60, "test": 12, "size": 8, "classes": 4},
    "partition": "dirichlet_unbalanced=2", "batch_size": 16, "local_steps": 2,
    "model": {"name": "resnet", "widths": [4, 6]}, "dtype": "float64",
    "algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9, "momentum_state": "local"},
}  # fmt: skip


PRIORITIES = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fednorm.experiment.flower.nodes import start_simulation

app = ClientApp()

@app.query()
def tell(message, context):
    return Message(RecordDict({"found": ConfigRecord({"nice": os.nice(0)})}), reply_to=message)

with start_simulation(app, 2) as grid:
    messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages))
assert [reply.content["found"]["nice"] for reply in replies] == [os.nice(0)] * 2
"""


@pytest.mark.slow
def test_two_simulations_at_once_give_what_the_loop_gives(tmp_path):
    config, ours, loop = (tmp_path / name for name in ("config.toml", "flower", "loop"))
    config.write_text(tomli_w.dumps(VALUES))
    command = [Path(sys.executable).with_name("fednorm"), "run", config, "--out", ours]
    # In new processes: Ray leaves things behind that only the end of a process clears away. The
    # cluster that Ray is told to join does not exist, as if it belonged to a run that is over.
    env = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "RAY_ADDRESS": "127.0.0.1:1"}
    with subprocess.Popen([sys.executable, "-c", PRIORITIES], env=env) as other:
        done = subprocess.run([*command, "--engine", "flower"], env=env, check=False)
    assert done.returncode == 0
    assert other.returncode == 0
    run_comparison(build_experiment(VALUES | {"engine": "loop"}), folder=loop)
    found, expected = (
        json.loads((folder / "runs/fedbn-seed0/run.json").read_text())["result"]
        for folder in (ours, loop)
    )
    assert found["status"] == "finished"
    assert found["history"] == expected["history"]
    mine, theirs = (load_file(f / "runs/fedbn-seed0/model.safetensors") for f in (ours, loop))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_runtime_that_fails_is_reported_at_once(monkeypatch):
    def fail(**_):
        raise OSError("no room on this machine")

    monkeypatch.setattr("ray.init", fail)
    with (
        pytest.raises(SimulationError, match="did not start") as raised,
        start_simulation(ClientApp(), 1),
    ):
        pass
    assert "no room" in str(raised.value.__cause__.__cause__.__cause__)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"diagnose": True}, "cannot diagnose"),
        ({"unseen_clients": 1}, "unseen_init = 'initial'"),
        ({"participation": 0.5}, "unseen_init = 'initial'"),
        ({"client_dropout": 0.1}, "unseen_init = 'initial'"),
        ({"evaluate": "global"}, "use evaluate = 'auto'"),
        (
            {"strategies": ["fbn"], "evaluate": "global", "adapt_statistics": 0.5},
            "use evaluate = 'auto'",
        ),
    ],
)
def test_what_nodes_cannot_do_is_refused_before_the_first_round(values, message):
    with pytest.raises(ConfigError, match=message):
        run_comparison(build_experiment(VALUES | {"engine": "flower"} | values))


def test_a_superlink_needs_the_engine(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("rounds = 1\n")
    result = CliRunner().invoke(
        command_line, ["run", str(config), "--superlink", "127.0.0.1:1", "--out", str(tmp_path)]
    )
    assert isinstance(result.exception, ConfigError)
    assert "--engine flower" in str(result.exception)


def test_a_superlink_that_is_not_there_is_told(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("rounds = 1\nengine = 'flower'\n")
    result = CliRunner().invoke(
        command_line, ["run", str(config), "--superlink", "127.0.0.1:1", "--out", str(tmp_path)]
    )
    assert "did not take the run" in str(result.exception)
