"""Data sets of Hugging Face, made here: nothing is downloaded."""

import importlib
import importlib.util
import sys

import numpy as np
import pytest
import torch

from fednorm.data import load_dataset
from fednorm.errors import MissingDataError

pytestmark = pytest.mark.usefixtures("home")
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra hf is not installed"
)


class Image:
    pass


class ClassLabel:
    num_classes = 3


class Value:
    pass


class Part(list):
    """What of the library's data sets is used."""

    _fingerprint = "abc"

    def __init__(self, rows, **features):
        super().__init__(rows)
        self.features = features

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.fixture
def pixels(tmp_path, draw):
    return [draw(tmp_path / "p" / f"{number}.png", seed=number) for number in range(12)]


@pytest.fixture
def part(pixels):
    from PIL import Image as Pillow  # noqa: PLC0415 (the name is a feature's here)

    rows = [
        {"photo": Pillow.fromarray(p), "kind": i % 3, "who": f"w{i % 2}", "n": i}
        for i, p in enumerate(pixels)
    ]
    return Part(rows, n=Value(), photo=Image(), kind=ClassLabel(), who=Value())


def answer(monkeypatch, **parts):
    asked = []

    class Library:
        @staticmethod
        def load_dataset(path, config, data_dir):
            asked.append((path, config, data_dir))
            return parts

    monkeypatch.setitem(sys.modules, "datasets", Library)
    return asked


def test_columns_are_found_by_their_type(monkeypatch, part, pixels):
    asked = answer(monkeypatch, train=part, validation=part)
    data = load_dataset("hf", 0, path="someone/birds", config="small", group="who")
    assert asked == [("someone/birds", "small", None)]
    assert torch.equal(data.x, torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))
    assert data.y.tolist() == [0, 1, 2] * 4
    assert data.classes == 3
    assert data.groups.tolist() == data.groups_test.tolist() == ["w0", "w1"] * 6


def test_a_share_is_held_out_without_a_test_part(monkeypatch, part):
    answer(monkeypatch, train=part)
    data = load_dataset("hf", 0, path="someone/birds", test_share=0.25, size=4, channels=1)
    assert data.shape == (1, 4, 4)
    assert data.y.bincount().tolist() == [3, 3, 3]
    assert data.y_test.bincount().tolist() == [1, 1, 1]


def test_the_error_of_a_missing_column_lists_the_columns(monkeypatch, part):
    del part.features["kind"]
    answer(monkeypatch, train=part)
    with pytest.raises(ValueError, match=r"type ClassLabel, but there are: n \(Value\), photo"):
        load_dataset("hf", 0, path="someone/birds")


def test_an_unknown_group_and_a_missing_part_are_explained(monkeypatch, part):
    answer(monkeypatch, train=part)
    with pytest.raises(ValueError, match=r"column of data set 'someone/birds' 'whom'.*'who'"):
        load_dataset("hf", 0, path="someone/birds", group="whom")
    answer(monkeypatch, test=part)
    with pytest.raises(MissingDataError, match="needs a part 'train', but has test"):
        load_dataset("hf", 0, path="someone/birds")
    with pytest.raises(ValueError, match="'hf' needs path"):
        load_dataset("hf", 0)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingDataError, match="extra hf brings; install it with: pip install"):
        load_dataset("hf", 0, path="someone/birds")


@needs_library
@pytest.mark.filterwarnings("default")
def test_the_library_reads_a_folder(tmp_path, draw, monkeypatch):
    datasets = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "birds" / "train"
    drawn = [draw(folder / kind / f"{i}.png", seed=i) for kind in "ab" for i in range(5)]
    data = load_dataset("hf", 0, path="imagefolder", root=str(tmp_path / "birds"), test_share=0.4)
    assert data.shape == (3, 8, 8)
    assert data.y.bincount().tolist() == [3, 3]
    assert data.y_test.bincount().tolist() == [2, 2]
    known = {pixels.transpose(2, 0, 1).tobytes() for pixels in drawn}
    assert all(image.numpy().tobytes() in known for image in data.x)
