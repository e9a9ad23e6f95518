"""Experiments with absurd values end with a sentence, not with a traceback, a hang or a crash."""

import re

import pytest
import tomli_w
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import make_validation, run_comparison
from fednorm.experiment.schema.load import build_experiment, parse_value, read_toml

SMALL = {"strategies": ["gn"], "seeds": 1, "rounds": 1, "clients": 2}
HUGE = 10**18
ABSURD = {
    "clients": {"clients": HUGE},
    "unseen clients": {"unseen_clients": HUGE},
    "rounds": {"rounds": 1000 * HUGE},
    "batch": {"batch_size": 1000 * HUGE},
    "steps": {"algorithm": "fedavg", "local_steps": 1000 * HUGE},
    "epochs": {"algorithm": "fedavg", "local_epochs": HUGE},
    "evaluations": {"eval_every": 1000 * HUGE},
    "seeds": {"seeds": 10**9},
    "a seed": {"seeds": [10**30]},
    "threads": {"threads": 10**9},
    "rate": {"algorithm": {"name": "dsgd", "lr": 1e308}},
    "infinite rate": {"algorithm": {"name": "fedavg", "lr": float("inf")}},
    "decay": {"algorithm": {"name": "dsgd", "weight_decay": 1e308}},
    "server rate": {"algorithm": {"name": "fedavg", "server_lr": 1e308}},
    "no tau": {"algorithm": {"name": "fedavg", "server": "adam", "server_tau": 1e-320}},
    "regularizer": {"algorithm": {"name": "feddyn", "alpha": 1e300}},
    "no regularizer": {"algorithm": {"name": "feddyn", "alpha": 1e-300}},
    "proximal term": {"algorithm": {"name": "fedprox", "mu": 1e308}},
    "strategies": {"strategies": ["gn"] * 10**5},
    "model object": {"model": "object:os.system"},
    "memory": {"client_state_memory": float("inf")},
    "much memory": {"client_state_memory": 1e300},
    "no number": {"client_state_memory": float("nan")},
    "timeout": {"timeout": float("inf")},
    "model": {"model": {"name": "mlp", "hidden": [10**12]}},
    "samples": {"data": {"name": "patterns", "samples": 10**14}},
    "more samples": {"data": {"name": "patterns", "samples": 10**30}},
}


@pytest.mark.parametrize("kind", ABSURD)
def test_absurd_values_are_refused(kind):
    with pytest.raises(ConfigError) as caught:
        run_comparison(build_experiment(SMALL | ABSURD[kind]))
    assert 20 < len(str(caught.value)) < 1000


DEEP = {
    "tables": "[" + ".".join(["a"] * 500) + "]\nb = 1\n",
    "lists": "x = " + "[" * 500 + "]" * 500,
    "inline tables": "x = " + "{a = " * 500 + "1" + "}" * 500,
    "digits": "rounds = 1" + "0" * 5000,
    "bytes": "\0",
}


@pytest.mark.parametrize("kind", DEEP)
def test_files_that_no_reader_can_take_are_refused(kind, tmp_path):
    (tmp_path / "a.toml").write_text(DEEP[kind])
    with pytest.raises(ConfigError, match=r"a\.toml|unknown key 'a'"):
        build_experiment(read_toml(tmp_path / "a.toml"))


@pytest.mark.parametrize(
    "sweep",
    [
        {"lr": [*range(1, 10**5)]},
        {"lr": [*range(1, 100)], "batch_size": [*range(1, 100)], "local_steps": [*range(1, 100)]},
    ],
)
def test_sweeps_of_more_runs_than_can_be_made_are_refused(sweep):
    """They would take hours to be listed."""
    with pytest.raises(ConfigError, match="at most 1000 strategies, not "):
        build_experiment({"strategies": ["gn"], "sweep": sweep})
    with pytest.raises(ConfigError, match="at most 1000 strategies, not "):
        make_validation(build_experiment({"strategies": ["gn"], "tune": sweep}))


def test_deep_values_of_options_are_text():
    assert parse_value("[" * 500) == "[" * 500
    assert parse_value("1" + "0" * 5000) == "1" + "0" * 5000


@pytest.mark.slow
@pytest.mark.parametrize("label", ["[/x]", "[bold]", "\x1b[2J", "../../up", ".", "ü" * 60])
def test_a_label_is_text(label, tmp_path):
    config = tmp_path / "a.toml"
    values = SMALL | {"strategies": [{"name": "gn", "label": label}]}
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path / "out")])
    if label == "\x1b[2J":
        assert isinstance(done.exception, ConfigError)
        assert "\x1b" not in str(done.exception)
        return
    assert done.exit_code == 0, done.exception
    assert label in re.sub(r"\s", "", done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml", "out"}
