"""What users import: everything is there, lazily, and its docstring shows how it is used."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fednorm
from fednorm import errors

KINDS = {
    "strategy": "strategies",
    "algorithm": "algorithms",
    "partition": "partitions",
    "aggregator": "aggregators",
    "attack": "attacks",
    "model": "models",
}
PUBLIC = [name for name in fednorm.__all__ if name != "flower"]  # which is an extra


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_an_example(name):
    value = getattr(fednorm, name)
    assert ">>>" in inspect.getdoc(value)
    assert name in dir(fednorm)
    assert getattr(fednorm, name) is value


@pytest.mark.parametrize("module", ["doctor", pytest.param("flower", marks=pytest.mark.flower)])
def test_what_a_public_module_exports_has_a_docstring_with_an_example(module):
    found = importlib.import_module(f"fednorm.{module}")
    docs = {name: inspect.getdoc(getattr(found, name)) for name in found.__all__}
    assert [name for name, text in docs.items() if ">>>" not in text] == []


@pytest.mark.parametrize(("kind", "plural"), KINDS.items())
def test_what_is_listed_is_known_by_name(kind, plural):
    names = getattr(fednorm, f"list_{plural}")()
    assert names == sorted(names)
    assert len(names) == len(set(names)) > 1
    other = {"model": {"shape": (1,), "classes": 2, "seed": 0}}.get(kind, {})
    with pytest.raises(errors.UnknownNameError, match=f"unknown {kind} 'no_such'"):
        getattr(fednorm, f"create_{kind}")("no_such", **other)


def test_data_sets_are_listed_and_loaded_by_name():
    assert "digits" in fednorm.list_datasets()
    with pytest.raises(errors.UnknownNameError, match="unknown data set 'digit'; did you mean"):
        fednorm.load_dataset("digit", 0)


@pytest.mark.parametrize("name", ["strategies", "doctor", "errors", "attacks", "models", "data"])
def test_a_module_is_not_hidden_by_a_function(name):
    assert isinstance(importlib.import_module(f"fednorm.{name}"), ModuleType)
    assert isinstance(getattr(fednorm, name), ModuleType)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fednorm' has no attribute 'strategie'"):
        fednorm.strategie  # noqa: B018 (asking for it is the test)


def test_convert_returns_a_converted_copy():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    converted = fednorm.convert(model, "gn", groups=4)
    assert type(model[1]) is nn.BatchNorm1d
    assert converted[1].num_groups == 4
    assert torch.equal(converted[0].weight, model[0].weight)
    assert converted[0].weight is not model[0].weight
    same = fednorm.convert(model, fednorm.create_strategy("gn", groups=4))
    assert same[1].num_groups == 4


def test_convert_takes_fields_by_name_or_a_strategy_but_not_both():
    with pytest.raises(errors.ConfigError, match="groups"):
        fednorm.convert(nn.BatchNorm1d(4), fednorm.create_strategy("gn"), groups=4)


@pytest.mark.slow
def test_flower_without_flower_says_what_to_install():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import fednorm\n"
        "try: fednorm.flower\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == (
        "fednorm.flower needs Flower, which is not installed; in a checkout of fednorm: "
        'pip install ".[flower]".'
    )


def test_all_exceptions_have_one_root_and_one_place():
    found = [
        cls for cls in vars(errors).values() if getattr(cls, "__module__", "") == errors.__name__
    ]
    assert len(found) > 10
    assert all(issubclass(cls, errors.FednormError) for cls in found)
    assert all(cls.__doc__ for cls in found)
    texts = {path.name: path.read_text() for path in Path(fednorm.__file__).parent.rglob("*.py")}
    elsewhere = {
        name
        for file, text in texts.items()
        for name in re.findall(r"^class (\w+Error)\b", text, re.MULTILINE)
        if file != "errors.py"
    }
    # Signals of engines, each caught where it is expected; none reaches a user.
    assert elsewhere <= {"PendingError", "UnmatchedDrawError", "_DismissedError"}


@pytest.mark.parametrize("setting", ["seeds", "strategies"])
def test_simulate_runs_one_strategy_with_one_seed(setting):
    with pytest.raises(errors.ConfigError, match=f"one seed; use fednorm.compare for '{setting}'"):
        fednorm.simulate("gn", rounds=2, clients=3, **{setting: 1})
