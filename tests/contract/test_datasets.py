"""What every data set promises; a new one is tested by being registered."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.data import DATASETS, load_dataset

UNLABELED = 255  # a pixel of a mask
FIELDS = {name: {f.name for f in dataclasses.fields(cls)} for name, cls in DATASETS.items()}
FILES = sorted(name for name in DATASETS if FIELDS[name] & {"root", "path"})
AT_HAND = sorted(set(DATASETS) - set(FILES))
BYTES = {"scenes"}  # its images are bytes, as those of files
SMALL = {"patterns": {"samples": 60, "test": 30}, "scenes": {"samples": 12, "test": 6}}
every = pytest.mark.parametrize("name", sorted(DATASETS))
at_hand = pytest.mark.parametrize("name", AT_HAND)


def small(name, seed=0):
    return load_dataset(name, seed, **SMALL.get(name, {}))


def tensors(data):
    return data.x, data.y, data.x_test, data.y_test


@every
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = DATASETS[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.__doc__.partition("\n")[0].endswith("."), cls.__doc__
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


def test_all_are_listed_by_the_command():
    result = CliRunner().invoke(app, ["list", "data"])
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert DATASETS.keys() <= listed


def test_some_are_always_at_hand():
    assert {"digits", "ring", "patterns", "scenes"} <= set(AT_HAND)


@pytest.mark.parametrize("name", FILES)
def test_one_that_is_missing_says_how_to_get_it(name, home):
    with pytest.raises((OSError, ValueError)) as raised:
        load_dataset(name, 0)
    message = str(raised.value)
    assert message.startswith(f"data set {name!r} ")
    assert re.search(r"(?<![/-])\b(root|path)\b", message)  # the field to set, not a folder
    left = [path for path in home.rglob("*") if path.is_file()]
    assert all(path.suffix == ".lock" for path in left)


@pytest.mark.parametrize("name", [name for name in FILES if "path" not in FIELDS[name]])
def test_a_root_without_its_files_is_named(name, home):
    with pytest.raises((OSError, ValueError), match="nothing_here"):
        load_dataset(name, 0, root=str(home / "nothing_here"))


@at_hand
def test_types_shapes_and_sizes_agree(name, home):
    data = small(name)
    assert data.name == name
    assert data.shape == data.x.shape[1:] == data.x_test.shape[1:]
    assert len(data.x) == len(data.y) > 0
    assert len(data.x_test) == len(data.y_test) > 0
    assert data.x.dtype == data.x_test.dtype == (torch.uint8 if name in BYTES else torch.float32)
    assert torch.isfinite(data.x).all()
    assert data.y.dtype == data.y_test.dtype == (torch.uint8 if data.segmentation else torch.int64)
    for groups, x in ((data.groups, data.x), (data.groups_test, data.x_test)):
        assert groups is None or len(groups) == len(x)
    assert not any(home.glob("**/*.*"))  # and it wrote no file


@at_hand
def test_every_class_occurs_and_no_other(name):
    data = small(name)
    assert set(data.y.unique().tolist()) - {UNLABELED} == set(range(data.classes))
    assert set(data.y_test.unique().tolist()) - {UNLABELED} <= set(range(data.classes))


@at_hand
def test_the_seed_alone_decides_the_data(name):
    torch.manual_seed(1)
    first = small(name, 5)
    torch.manual_seed(2)
    assert all(map(torch.equal, tensors(first), tensors(small(name, 5))))
    assert not torch.equal(first.x, small(name, 6).x)


@at_hand
def test_global_generators_are_not_touched(name):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 (the legacy one)
    small(name, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002 (the legacy one)


@at_hand
def test_no_test_sample_is_a_training_sample(name):
    data = small(name)
    known = {sample.numpy().tobytes() for sample in data.x}
    assert not any(sample.numpy().tobytes() in known for sample in data.x_test)


@at_hand
def test_batches_are_as_a_model_sees_them(name):
    data = small(name)
    x, y = data.training_batch(np.arange(3))
    assert x.shape == (3, *data.shape)
    assert x.dtype is torch.float32
    assert y.shape == data.y[:3].shape
    assert y.dtype is torch.int64
