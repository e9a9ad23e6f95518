"""Images are decoded to arrays: in threads, once, and mapped if they are too large."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from fednorm.data import image_files, load_dataset
from fednorm.data.decoder import Decoder, center_crop, to_array
from fednorm.data.federation import build_federation
from fednorm.data.image_files import ImageFiles, fingerprint, load_decoded
from fednorm.data.sampling import Plan
from fednorm.errors import DamagedDataError

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def files(tmp_path, draw):
    paths = [tmp_path / "images" / f"{number:02}.png" for number in range(12)]
    for seed, path in enumerate(paths):
        draw(path, seed=seed)
    return ImageFiles(paths, np.arange(12) % 3)


@pytest.fixture
def tree(tmp_path, draw):
    """Two domains, three classes, five images each."""
    for domain in range(2):
        for label in range(3):
            for number in range(5):
                path = tmp_path / "tree" / f"d{domain}" / f"c{label}" / f"{number}.png"
                draw(path, seed=100 * domain + 10 * label + number)
    return str(tmp_path / "tree")


class Counting:
    """Decodes, and counts how often."""

    def __init__(self):
        self.decoder = Decoder(self.decode, "plain")
        self.count = 0

    def decode(self, path):
        self.count += 1
        return center_crop(None).image(path)


def test_threads_decode_the_same_arrays_as_one(files, monkeypatch):
    arrays = load_decoded("a", files, files.take(np.arange(3)), center_crop(None))
    monkeypatch.setattr(image_files, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    monkeypatch.setattr(image_files, "_AT_ONCE", 5)
    serial = load_decoded("b", files, files.take(np.arange(3)), center_crop(None))
    expected = [np.asarray(Image.open(path)).transpose(2, 0, 1) for path in files.paths]
    assert np.array_equal(arrays["x"], np.stack(expected))
    assert all(np.array_equal(arrays[key], serial[key]) for key in ("x", "y", "x_test", "y_test"))
    assert arrays["y"].tolist() == files.labels.tolist()


def test_decoded_arrays_are_reused(files):
    counting = Counting()
    first = load_decoded("a", files, files, counting.decoder)
    seen = counting.count
    again = load_decoded("a", files, files, counting.decoder)
    assert seen >= 24
    assert counting.count == seen
    assert np.array_equal(first["x"], again["x"])


@pytest.mark.parametrize("change", ["content", "time", "name", "label", "settings", "order"])
def test_any_change_is_noticed(files, draw, change):
    before = fingerprint([files], "plain")
    assert fingerprint([files], "plain") == before
    settings, path = "plain", files.paths[3]
    if change == "content":
        draw(path, size=(9, 9))
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "name":
        files.paths[3] = path.rename(path.with_name("x.png"))
    elif change == "label":
        files.labels[3] += 1
    elif change == "order":
        files.paths.reverse()
    else:
        settings = "other"
    assert fingerprint([files], settings) != before


def test_a_changed_image_is_decoded_again(files, draw):
    load_decoded("a", files, files, center_crop(None))
    pixels = draw(files.paths[0], seed=99)
    os.utime(files.paths[0], ns=(1, 1))
    arrays = load_decoded("a", files, files, center_crop(None))
    assert np.array_equal(arrays["x"][0], pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_corrupt_image_is_named(files, home, damage):
    bad = files.paths[7]
    data = {"cut": bad.read_bytes()[:100], "text": b"no image", "empty": b""}[damage]
    bad.write_bytes(data)
    with pytest.raises(DamagedDataError, match=f"image {bad} cannot be read: .*; replace it"):
        load_decoded("a", files, files, center_crop(None))
    assert not list((home / "decoded" / "a").glob("*/index.json"))


def test_images_of_two_sizes_need_a_size(files, draw):
    draw(files.paths[5], size=(9, 8))
    with pytest.raises(DamagedDataError, match=r"05\.png has shape \(3, 9, 8\) and.*set the"):
        load_decoded("a", files, files, center_crop(None))
    assert load_decoded("a", files, files, center_crop(6))["x"].shape == (12, 3, 6, 6)


def test_the_short_side_is_resized_and_the_middle_kept():
    stripes = np.zeros((4, 12, 3), np.uint8)
    stripes[:, 4:8] = 200
    assert (to_array(Image.fromarray(stripes), 4, 3) == 200).all()
    assert to_array(Image.fromarray(stripes.transpose(1, 0, 2)), 4, 1).tolist() == [[[200] * 4] * 4]
    assert to_array(Image.fromarray(stripes), None, 3).shape == (3, 4, 12)


def batches(data, plan):
    parts = build_federation(data, "natural", plan, clients=2, seed=0)
    train = [batch for client in range(2) for batch in parts.batches(client, 1).steps]
    return train + [batch for client in range(2) for batch in parts.test(client)]


@pytest.mark.parametrize("augment", [None, "crop_flip"])
def test_mapped_from_disk_gives_the_same_batches(tree, monkeypatch, augment):
    fields = {"root": tree, "size": None, "augment": augment}
    plan = Plan(4, steps=3)
    held = load_dataset("folder", 0, **fields)
    monkeypatch.setenv("FEDNORM_DATA_LIMIT", "0")
    mapped = load_dataset("folder", 0, **fields)
    assert (held.on_disk, mapped.on_disk) == (False, True)
    ours, theirs = batches(held, plan), batches(mapped.to("cpu"), plan)
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
    before = mapped.x.clone()
    mapped.x[:] = 0  # in memory only
    assert torch.equal(load_dataset("folder", 0, **fields).x, before)


def test_the_images_are_not_needed_once_decoded_but_their_list_is(tree):
    first = load_dataset("folder", 0, root=tree)
    assert torch.equal(load_dataset("folder", 0, root=tree).x, first.x)
    shutil.rmtree(tree)
    with pytest.raises(OSError, match=r"needs a folder, but .*tree is none"):
        load_dataset("folder", 0, root=tree)
