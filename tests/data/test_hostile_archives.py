"""Archives and pickles that were made to harm: each is refused with a sentence."""

import contextlib
import gzip
import pickle
import resource
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fednorm.data import load_dataset
from fednorm.data.datasets.cifar import read_pickle
from fednorm.data.datasets.mnist import FILES, read_idx_folder, read_keras_file
from fednorm.data.sources import read_member
from fednorm.errors import DamagedDataError

pytestmark = pytest.mark.usefixtures("home")
GIGABYTE = 10**9
ARRAY = np.arange(6, dtype=np.uint8).reshape(2, 3)


@pytest.fixture(autouse=True)
def _little_memory():
    """Unpacking a bomb would fail for lack of memory rather than with a sentence."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def write_bomb(path, names, size):
    """Write an archive that says that each of its files has `size` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.writestr(name, b"0")
        for info in file.filelist:
            info.file_size = size


def test_a_zip_bomb_is_measured_before_it_is_unpacked(tmp_path, home):
    names = [f"tiny-imagenet-200/{number}" for number in range(5)]
    write_bomb(tmp_path / "tiny-imagenet-200.zip", names, GIGABYTE // 2)
    with pytest.raises(DamagedDataError, match=r"tiny-imagenet-200.zip.*2500000000 bytes unpacked"):
        load_dataset("tiny_imagenet", 0, root=str(tmp_path))
    assert not any(path.stat().st_size > 10**7 for path in home.rglob("*"))


def test_other_bombs_are_measured_too(tmp_path, monkeypatch):
    write_bomb(tmp_path / "mnist.npz", ["x_train.npy"], GIGABYTE)
    with pytest.raises(DamagedDataError, match=r"x_train\.npy would have 1000000000 bytes"):
        read_keras_file(tmp_path / "mnist.npz")
    monkeypatch.setattr("fednorm.data.sources.MOST_UNPACKED", 10**6)
    with gzip.open(tmp_path / f"{FILES['x']}.gz", "wb", compresslevel=1) as file:
        file.write(bytes(3 * 10**6))
    with pytest.raises(DamagedDataError, match="bytes unpacked, more than 1000000"):
        read_idx_folder(tmp_path)


def test_a_large_member_of_a_tar_file_is_not_read(tmp_path):
    info = tarfile.TarInfo("large")
    info.size = 3 * GIGABYTE
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(info.tobuf())
        file.truncate(info.size + 10_240)  # a hole, which takes no room
    with (
        tarfile.open(tmp_path / "a.tar") as archive,
        pytest.raises(DamagedDataError, match="large would have 3000000000 bytes"),
    ):
        read_member(archive, "large")


def make_array(
    kind=b"u1", state=(3, b"|", None, None, None, -1, -1, 0), shape=(6,), data=b"012345"
):
    """Return a pickle of a dictionary with an array that is described as given."""

    class Kind:
        def __reduce__(self):
            return np.dtype, (kind, False, True), state

    class Array:
        def __reduce__(self):
            return (
                np.empty(0).__reduce__()[0],
                (np.ndarray, (0,), b"b"),
                (1, shape, Kind(), False, data),
            )

    return pickle.dumps({b"data": Array()}, 3)


CRAFTED = {
    "objects": make_array(b"O8"),
    "objects_by_state": make_array(state=(3, b"|", None, None, None, -1, -1, 63)),
    "flags": make_array(state=(3, b"|", None, None, None, -1, -1, 1)),
    "sizes": make_array(state=(3, b"|", None, None, None, 10**6, 1, 0)),
    "parts": make_array(state=(3, b"|", (b"u1", (4,)), None, None, -1, -1, 0)),
    "names": make_array(state=(3, b"|", None, (b"a",), {b"a": (b"O", 0)}, 8, 1, 27)),
    "order": make_array(state=(3, b"x", None, None, None, -1, -1, 0)),
    "short_state": make_array(state=(3,)),
    "structure": make_array(b"u1,u1"),
    "large_shape": make_array(shape=(10**12,)),
    "negative_shape": make_array(shape=(-5, -7)),
    "data_are_a_number": make_array(data=10**12),
    "data_are_a_list": make_array(data=[object] * 6),
    "large_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "large_frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
    "deep_key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "deep_set": b"\x80\x04\x8f(" + b")" + b"\x85" * 1_000_000 + b"\x90.",
    "items_of_a_list": b"\x80\x02]K\x00K\x01s.",
    "items_of_an_array": b"\x80\x02cnumpy\ndtype\n(U\x02u1tRK\x00K\x01s.",
    "long_number": b"\x80\x02L" + b"9" * 10_000 + b"L\n.",
    "extension": b"\x80\x02\x82\x01.",
    "new_object": b"\x80\x02cnumpy\nndarray\n(K\x09t\x81.",
    "old_object": b"(inumpy\nndarray\n.",
    "a_list": pickle.dumps([1, 2]),
    "nothing": b"",
    "no_end": b"\x80\x02}",
    "text": b"hello",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_pickles_are_refused(kind):
    with pytest.raises(DamagedDataError):
        read_pickle(CRAFTED[kind])


@pytest.mark.slow
def test_odd_pickles_that_are_read_do_no_harm():
    assert read_pickle(b"\x80\x02}r\xff\xff\xff\x7f.") == {}  # asks for 2 ** 31 places
    assert list(read_pickle(b"\x80\x02}K\x01)" + b"\x85" * 1_000_000 + b"s.")) == [1]


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("kind", ["u1", ">f4", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_they_were(protocol, kind, order):
    array = np.asarray(ARRAY.astype(kind), order=order)
    content = {b"data": array, b"labels": [1, 2], b"name": b"batch"}
    found = read_pickle(pickle.dumps(content, protocol))
    assert np.array_equal(found[b"data"], array)
    assert found[b"data"].dtype == array.dtype
    assert (found[b"labels"], found[b"name"]) == ([1, 2], b"batch")


def test_no_mutation_of_a_pickle_ends_the_process():
    source = np.frombuffer(pickle.dumps({b"data": ARRAY, b"labels": [1, 2]}, 3), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        mutant = source.copy()
        count = rng.integers(1, 5)
        mutant[rng.integers(len(mutant), size=count)] = rng.integers(256, size=count)
        with contextlib.suppress(DamagedDataError):
            read_pickle(mutant.tobytes())
