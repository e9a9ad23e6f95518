"""FEMNIST as LEAF writes it."""

import json

import numpy as np
import pytest
import torch

from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.errors import DamagedDataError, MissingDataError

pytestmark = pytest.mark.usefixtures("home")


def leaf(path, writers, seed=0):
    """Write a file of LEAF, and return the pixels of each writer as bytes."""
    rng = np.random.default_rng(seed)
    pixels = {w: rng.integers(0, 256, (n, 784), dtype=np.uint8) for w, n in writers.items()}
    content = {
        "users": list(writers),
        "num_samples": list(writers.values()),
        "user_data": {
            w: {"x": (x / 255).tolist(), "y": (np.arange(len(x)) % 62).tolist()}
            for w, x in pixels.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return pixels


@pytest.fixture
def halves(tmp_path):
    root = tmp_path / "leaf"
    train = leaf(root / "train" / "all_data_0_train.json", {"f0001": 6, "f0002": 4}, 1)
    train |= leaf(root / "train" / "all_data_1_train.json", {"f0010_long": 5}, 2)
    leaf(root / "test" / "all_data_0_test.json", {"f0010_long": 2, "f0001": 3, "f0002": 1}, 3)
    return root, train


def test_writers_are_groups_and_pixels_are_kept(halves):
    root, train = halves
    data = load_dataset("femnist", 0, root=str(root))
    assert data.classes == 62
    assert data.x.shape == (15, 1, 28, 28)
    assert data.groups.tolist() == ["f0001"] * 6 + ["f0002"] * 4 + ["f0010_long"] * 5
    for writer, pixels in train.items():
        own = data.x[data.groups == writer].numpy()
        assert np.array_equal(own.reshape(len(own), -1), pixels)
    assert data.y[data.groups == "f0002"].tolist() == [0, 1, 2, 3]
    assert len(data.y_test) == 6


def test_clients_are_the_writers(halves):
    data = load_dataset("femnist", 0, root=str(halves[0]))
    parts = build_federation(data, "natural", Plan(2), clients=3, seed=0)
    assert [len(part) for part in parts.parts] == [6, 4, 5]
    assert [len(part) for part in parts.test_parts] == [3, 1, 2]


def test_the_second_time_nothing_is_parsed(halves, monkeypatch):
    root, _ = halves
    first = load_dataset("femnist", 0, root=str(root))
    monkeypatch.setattr("fednorm.data.datasets.mnist.read_leaf_file", None)
    assert torch.equal(load_dataset("femnist", 0, root=str(root)).x, first.x)


def test_without_a_test_part_every_writer_gives_its_share(tmp_path):
    leaf(tmp_path / "leaf" / "all_data_0.json", {"a": 10, "b": 20})
    data = load_dataset("femnist", 0, root=str(tmp_path / "leaf"), test_share=0.3)
    assert (np.unique(data.groups, return_counts=True)[1]).tolist() == [7, 14]
    assert (np.unique(data.groups_test, return_counts=True)[1]).tolist() == [3, 6]
    assert not torch.equal(
        data.x, load_dataset("femnist", 1, root=str(tmp_path / "leaf")).x[: len(data.x)]
    )


def test_a_part_of_the_samples_can_still_be_divided_by_writer(tmp_path):
    root = tmp_path / "leaf"
    leaf(root / "train" / "0.json", {f"w{i}": 4 for i in range(10)})
    leaf(root / "test" / "0.json", {f"w{i}": 2 for i in range(10)})
    data = load_dataset("femnist", 0, root=str(root), train=5)
    writers = set(data.groups)
    assert set(data.groups_test) == writers
    parts = build_federation(data, "natural", Plan(2), clients=len(writers), seed=0)
    assert sum(map(len, parts.test_parts)) == 2 * len(writers)


@pytest.mark.parametrize("content", ["{", "{}", '{"users": ["a"], "user_data": {}}', "[]"])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "leaf" / "all_data.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(DamagedDataError, match=f"{path} is not a file of LEAF's FEMNIST"):
        load_dataset("femnist", 0, root=str(path.parent))


def test_other_json_is_not_taken_for_femnist(tmp_path):
    (tmp_path / "work" / "data").mkdir(parents=True)
    (tmp_path / "work" / "data" / "settings.json").write_text("{}")
    with pytest.raises(MissingDataError, match="there are none at"):
        load_dataset("femnist", 0)


def test_missing_files_raise_an_error_with_instructions(tmp_path):
    with pytest.raises(MissingDataError, match=r"make them with LEAF's data/femnist/preprocess"):
        load_dataset("femnist", 0, root=str(tmp_path))
