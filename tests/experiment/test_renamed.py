"""A name that was renamed is refused, and the message tells the new one, whatever the way in."""

import re

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import (
    build_experiment,
    expand_sweep,
    override_settings,
    read_toml,
)
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.names import RENAMED
from fednorm.strategies import STRATEGIES

KEYS = {old: new for old, new in RENAMED.items() if new in Experiment.model_fields}
OWN = {old: new for old, new in KEYS.items() if new in OWN_SETTINGS}
ENGINES = {"lockstep": "merged", "cohort": "stacked", "meeting": "barrier", "workers": "processes"}
FIELDS = {("fbn", "momentum"): "stats_momentum", ("gn", "fit"): "round_down"}
OPTIONS = {
    "--batch": "--batch-size",
    "--steps": "--local-steps",
    "--epochs": "--local-epochs",
    "--aggregate": "--aggregator",
    "--aggregate-statistics": "--statistics-aggregator",
    "--dropout": "--client-dropout",
}


def told(old, new):
    return re.escape(f"{old!r} is now called {new!r}.")


def test_every_renamed_name_has_a_place_where_its_new_name_is_known():
    of_strategies = {field for _, field in FIELDS}
    assert set(RENAMED) == {*KEYS, *ENGINES, *of_strategies, "centred_clipping"}
    assert len(KEYS) == 11
    assert not set(RENAMED) & set(Experiment.model_fields)


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_a_key_of_a_file_or_a_setting_or_a_keyword(old, new, tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(f"{old} = 1\n")
    with pytest.raises(ConfigError, match=f"key {told(old, new)}"):
        build_experiment(read_toml(path))
    with pytest.raises(ConfigError, match=told(old, new)):
        build_experiment(override_settings({}, [f"{old}=1"]))
    with pytest.raises(ConfigError, match=told(old, new)):
        fednorm.simulate("fbn", **{old: 1})
    with pytest.raises(ConfigError, match=told(old, new)):
        fednorm.doctor.examine("mlp", **{old: 1})


@pytest.mark.parametrize(("old", "new"), OWN.items())
def test_a_key_that_an_entry_sets_or_that_is_swept(old, new):
    with pytest.raises(ConfigError, match=told(old, new)):
        build_experiment({"strategies": [{"name": "fbn", old: "median"}]})
    with pytest.raises(ConfigError, match=told(old, new)):
        expand_sweep({"strategies": ["fbn"]}, f"{old}=1,2")


@pytest.mark.parametrize(("strategy", "old", "new"), [(*key, new) for key, new in FIELDS.items()])
def test_a_field_of_a_strategy(strategy, old, new):
    with pytest.raises(ConfigError, match=told(old, new)):
        build_experiment({"strategies": [{"name": strategy, old: 0.1}]})
    with pytest.raises(ConfigError, match=told(old, new)):
        build_experiment(override_settings({}, [f"strategy.{old}=0.1"]))
    with pytest.raises(ConfigError, match=told(old, new)):
        expand_sweep({"strategies": [strategy]}, f"strategy.{old}=0.1,0.2")
    with pytest.raises(UnknownNameError, match=told(old, new)):
        fednorm.create_strategy(strategy, **{old: 0.1})


@pytest.mark.parametrize(("old", "new"), ENGINES.items())
def test_an_engine(old, new):
    with pytest.raises(ConfigError, match=f"engine {told(old, new)}"):
        build_experiment({"engine": old})


def test_an_aggregator():
    message = told("centred_clipping", "centered_clipping")
    with pytest.raises(ConfigError, match=message):
        build_experiment({"aggregator": "nnm > centred_clipping"})
    with pytest.raises(UnknownNameError, match=message):
        fednorm.create_aggregator("centred_clipping")


@pytest.mark.parametrize(("old", "new"), OPTIONS.items())
def test_an_option(old, new):
    result = CliRunner().invoke(app, ["compare", old, "1"], env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert f"option '{old}' is now called '{new}'." in result.output


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--adapt", "adapt_statistics"),
        ("--newcomers", "unseen_init"),
        ("--unseen-clients", "unseen_clients"),
        ("--engine", "engine"),
    ],
)
def test_an_option_that_only_a_key_replaces(option, key):
    result = CliRunner().invoke(app, ["compare", option, "1"], env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert f"use '--set {key}=VALUE'." in result.output


def test_names_that_are_still_used_elsewhere_are_accepted_there():
    assert build_experiment({"algorithm": {"name": "fedavg", "momentum": 0.5}})
    assert not any(
        "momentum" in vars(cls).get("__annotations__", {}) for cls in STRATEGIES.values()
    )
    result = CliRunner().invoke(app, ["compare", "--unknown", "1"])
    assert result.exit_code == 2
    assert "now called" not in result.output
    assert "--set" not in result.output
