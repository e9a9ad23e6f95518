"""Experiments on Flower's simulation runtime: the very result of the simulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fednorm.cli import app as command_line
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.load import build_experiment

VALUES = {
    "strategies": ["fedbn"], "seeds": 1, "rounds": 3, "clients": 3, "model": "cnn",
    "eval_every": 1,
}  # fmt: skip


def test_an_experiment_gives_the_same_on_the_simulation_runtime(tmp_path):
    config, ours, loop = (tmp_path / name for name in ("config.toml", "flower", "loop"))
    config.write_text(tomli_w.dumps(VALUES))
    command = [Path(sys.executable).with_name("fednorm"), "run", config, "--out", ours]
    # A process of its own: Ray leaves things behind that only the end of a process clears away.
    env = os.environ | {"FLWR_HOME": str(tmp_path / "home")}
    done = subprocess.run([*command, "--engine", "flower"], env=env, check=False)
    assert done.returncode == 0
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
