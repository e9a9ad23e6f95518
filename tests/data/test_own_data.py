"""A user's data set, named as package.module:function."""

import pytest
import torch

from fednorm.data import load_dataset
from fednorm.errors import ConfigError, UnknownNameError

MODULE = """
import torch
from fednorm.data import Dataset

def points(seed, count=4):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(count) % 2
    return Dataset("points", x, y, x, y, classes=2)

def fixed():
    return points(7)

def wrong():
    return [1, 2]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "my_own_data"


def test_the_function_gets_seed_and_fields(own):
    assert len(load_dataset(f"{own}:points", 3, count=6).y) == 6
    first, second = load_dataset(f"{own}:points", 3), load_dataset(f"{own}:points", 4)
    assert torch.equal(first.x, load_dataset(f"{own}:points", 3).x)
    assert not torch.equal(first.x, second.x)


def test_a_function_that_takes_no_seed(own):
    assert torch.equal(load_dataset(f"{own}:fixed", 3).x, load_dataset(f"{own}:points", 7).x)


def test_mistakes_are_explained(own):
    with pytest.raises(UnknownNameError, match=r"argument of data set 'my_own.*'counts'.*'count'"):
        load_dataset(f"{own}:points", 0, counts=3)
    with pytest.raises(UnknownNameError, match="did you mean 'points'"):
        load_dataset(f"{own}:point", 0)
    with pytest.raises(
        ConfigError, match=r"one \(train, test\) pair per client.* 0 is of type int"
    ):
        load_dataset(f"{own}:wrong", 0)
    with pytest.raises(ValueError, match="data set 'no_such_module:f' needs module"):
        load_dataset("no_such_module:f", 0)
    with pytest.raises(ValueError, match="your own data set is 'package"):
        load_dataset(":f", 0)
