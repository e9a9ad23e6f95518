"""A choice may be written as text: its name, with fields in brackets."""

import tomllib

import pytest
from pydantic import TypeAdapter

from fednorm.errors import ConfigError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, override_settings, to_toml
from fednorm.experiment.schema.specs import name_metrics


@pytest.mark.parametrize("key", ["algorithm", "attack", "data", "model", "loss"])
def test_any_choice_takes_its_fields_in_brackets(key):
    text, table = "mine:Mine(a=0.5, b=(8, 4), c=none)", {"a": 0.5, "b": [8, 4], "c": None}
    found = Experiment.model_fields[key].annotation
    spec = TypeAdapter(found).validate_python(text)
    assert (spec.name, spec.fields) == ("mine:Mine", table)


def test_strategies_with_fields_in_brackets_are_labelled_by_them():
    found = build_experiment(
        {"strategies": "gn(groups=2, round_down=true), gn(groups=4),fbn(lr=0.1)"}
    )
    assert [entry.title for entry in found.strategies] == [
        "gn(groups=2, round_down=true)",
        "gn(groups=4)",
        "fbn(lr=0.1)",
    ]
    assert [entry.fields for entry in found.strategies] == [
        {"groups": 2, "round_down": True},
        {"groups": 4},
        {},
    ]
    assert found.strategies[2].settings == {"algorithm": {"lr": 0.1}}
    assert build_experiment(tomllib.loads(to_toml(found))) == found


def test_set_changes_a_field_of_a_choice_with_brackets():
    values = {"attack": "gaussian(std=2.0)", "byzantine": 1}
    attack = build_experiment(override_settings(values, ["attack.std=3"])).attack
    assert (attack.name, attack.fields) == ("gaussian", {"std": 3})


@pytest.mark.parametrize("text", ["fedprox", "fedprox(mu=0.1)"])
def test_another_algorithm_keeps_the_learning_rate(text):
    values = {"strategies": "fbn", "algorithm": {"name": "dsgd", "lr": 0.2}}
    chosen = build_experiment(override_settings(values, [f"algorithm.name={text}"])).algorithm
    swept = build_experiment({**values, "sweep": {"algorithm": ["fedavg", text]}})
    assert chosen.name == "fedprox"
    assert chosen.fields == {"lr": 0.2, **({"mu": 0.1} if "mu" in text else {})}
    assert swept.for_entry(swept.strategies[1]).algorithm.fields == chosen.fields


def test_an_unknown_strategy_is_told_of_centralized():
    with pytest.raises(ConfigError, match=r"'centralised'; did you mean 'centralized' or"):
        build_experiment({"strategies": "centralised"})


def test_metrics_with_fields_in_brackets_are_called_as_their_functions_are():
    assert name_metrics("mine:top(k=3, among=(1, 2)), mine:mae") == {
        "top": {"name": "mine:top", "k": 3, "among": [1, 2]},
        "mae": {"name": "mine:mae"},
    }
