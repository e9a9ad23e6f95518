import json
import threading

import numpy as np
import pytest

from fednorm.data.cache import INDEX, digest, load_or_create, open_cached, save
from fednorm.errors import DamagedDataError

ARRAYS = {
    "x": np.arange(240, dtype=np.uint8).reshape(10, 1, 4, 6),
    "y": np.arange(10, dtype=np.int64),
    "groups": np.array(["berlin", "ulm"] * 5),
}


def write(folder):
    save(folder, ARRAYS)


def never(folder):
    raise AssertionError(folder)


def assert_same(arrays):
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        assert np.array_equal(array, ARRAYS[name])


def test_arrays_come_back_and_are_not_made_again(tmp_path):
    assert_same(load_or_create(tmp_path / "a", write))
    assert_same(load_or_create(tmp_path / "a", never))


def test_an_interrupted_write_is_never_used(tmp_path):
    def interrupted(folder):
        save(folder, ARRAYS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_create(tmp_path / "a", interrupted)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert_same(load_or_create(tmp_path / "a", write))


@pytest.mark.parametrize("broken", ["changed", "short", "empty", "gone", "list", "index"])
def test_damaged_arrays_are_created_again(tmp_path, broken):
    load_or_create(tmp_path / "a", write)
    path = tmp_path / "a" / "x.npy"
    if broken == "changed":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif broken == "short":
        path.write_bytes(path.read_bytes()[:-7])
    elif broken == "empty":
        path.write_bytes(b"")
    elif broken == "gone":
        path.unlink()
    elif broken == "list":
        (tmp_path / "a" / INDEX).write_text("[]")
    else:
        (tmp_path / "a" / INDEX).write_text('{"x": ')
    with pytest.raises((OSError, ValueError, EOFError, AttributeError)):
        open_cached(tmp_path / "a")
    assert_same(load_or_create(tmp_path / "a", write))


def test_beyond_the_limit_samples_are_mapped_and_may_be_written_to(tmp_path, monkeypatch):
    load_or_create(tmp_path / "a", write)
    monkeypatch.setenv("FEDNORM_DATA_LIMIT", "0")
    arrays = load_or_create(tmp_path / "a", never)
    assert isinstance(arrays["x"], np.memmap)
    assert not isinstance(arrays["y"], np.memmap)
    assert_same(arrays)
    arrays["x"][:] = 0  # stays in memory: the file is as it was
    assert_same(load_or_create(tmp_path / "a", never))


def test_a_mapped_file_of_another_size_is_noticed(tmp_path, monkeypatch):
    load_or_create(tmp_path / "a", write)
    np.save(tmp_path / "a" / "x.npy", ARRAYS["x"][:-1])
    monkeypatch.setenv("FEDNORM_DATA_LIMIT", "0")
    with pytest.raises(DamagedDataError, match=r"x\.npy has changed since it was written"):
        open_cached(tmp_path / "a")


@pytest.mark.parametrize("text", ["much", "-1", "nan"])
def test_a_limit_that_is_not_a_number_is_refused(tmp_path, monkeypatch, text):
    load_or_create(tmp_path / "a", write)
    monkeypatch.setenv("FEDNORM_DATA_LIMIT", text)
    with pytest.raises(ValueError, match=f"number of gigabytes such as 4, but is '{text}'"):
        open_cached(tmp_path / "a")


def test_only_one_of_two_concurrent_calls_creates_the_arrays(tmp_path):
    made, both = [], threading.Barrier(2)

    def slow(folder):
        made.append(folder)
        save(folder, ARRAYS)

    def work():
        both.wait()
        assert_same(load_or_create(tmp_path / "a", slow))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_digest_is_the_sha256_of_the_bytes_in_row_order(tmp_path):
    rows = np.arange(6, dtype=np.uint8).reshape(2, 3)
    known = "17e88db187afd62c16e5debf3e6527cd006bc012bc90b51a810cd80c2d511f43"  # of 00 … 05
    assert digest(rows) == digest(np.asfortranarray(rows)) == known
    save(tmp_path, {"x": rows})
    load_or_create(tmp_path / "a", lambda folder: save(folder, {"x": rows}))
    assert json.loads((tmp_path / "a" / INDEX).read_text())["x"]["sha256"] == known


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(DamagedDataError, match="is in the way of a decoded data set"):
        load_or_create(tmp_path / "a", write)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_a_mistyped_limit_does_not_mean_damaged_data(tmp_path, monkeypatch):
    load_or_create(tmp_path / "a", write)
    monkeypatch.setenv("FEDNORM_DATA_LIMIT", "four")
    with pytest.raises(ValueError, match="FEDNORM_DATA_LIMIT must be a number"):
        load_or_create(tmp_path / "a", never)
