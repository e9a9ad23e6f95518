"""Data sets of image files, in the layouts that they come in."""

import hashlib
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from fednorm.data import load_dataset
from fednorm.data.datasets import imagenet
from fednorm.data.datasets.cityscapes import LABELS, Cityscapes
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.errors import DamagedDataError, MissingDataError, UnknownNameError

pytestmark = pytest.mark.usefixtures("home")


def as_tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.fixture
def domains(tmp_path, draw):
    """Two domains of three classes; the first has ten images a class, the second five."""
    root = tmp_path / "images"
    for domain, count in (("photo", 10), ("sketch", 5)):
        for label in ("cat", "dog", "eel"):
            for number in range(count):
                suffix = ".jpg" if number % 2 else ".PNG"
                draw(root / domain / label / f"{number}{suffix}", size=(20, 16), seed=number)
    (root / "photo" / "notes.txt").write_text("no class")
    (root / ".hidden").mkdir()
    return root


def test_a_folder_of_domains(domains):
    data = load_dataset("folder", 0, root=str(domains), size=8)
    assert data.shape == (3, 8, 8)
    assert data.classes == 3
    assert (len(data.y), len(data.y_test)) == (36, 9)
    assert data.y.bincount().tolist() == [12] * 3
    for domain, train, test in (("photo", 8, 2), ("sketch", 4, 1)):
        assert data.y[data.groups == domain].bincount().tolist() == [train] * 3
        assert data.y_test[data.groups_test == domain].bincount().tolist() == [test] * 3
    assert not torch.equal(data.x, load_dataset("folder", 1, root=str(domains), size=8).x)
    assert data.transform.mean == data.transform.std == (0.5, 0.5, 0.5)


def test_clients_are_the_domains(domains):
    data = load_dataset("folder", 0, root=str(domains), size=8)
    parts = build_federation(data, "natural", Plan(4), clients=2, seed=0)
    assert [set(data.groups[part]) for part in parts.parts] == [{"photo"}, {"sketch"}]
    assert [set(data.groups_test[part]) for part in parts.test_parts] == [{"photo"}, {"sketch"}]


def test_a_folder_without_domains(tmp_path, draw):
    pixels = {
        (name, number): draw(tmp_path / "p" / name / f"{number}.png", seed=number, mode="L")
        for name in ("b", "a")
        for number in range(4)
    }
    data = load_dataset(
        "folder", 0, root=str(tmp_path / "p"), size=None, channels=1, test_share=0.25
    )
    assert data.groups is None
    assert data.shape == (1, 8, 8)
    assert (data.y.tolist(), data.y_test.tolist()) == ([0] * 3 + [1] * 3, [0, 1])
    known = {array.tobytes() for (name, _), array in pixels.items() if name == "a"}
    assert all(image.numpy().tobytes() in known for image in data.x[data.y == 0])


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_folder_with_its_own_test_part(tmp_path, draw, test):
    root = tmp_path / "p"
    first = draw(root / "train" / "ant" / "0.png", seed=1)
    draw(root / "train" / "bee" / "0.png", seed=2)
    last = draw(root / test / "bee" / "1.png", seed=3)
    data = load_dataset("folder", 5, root=str(root), size=None)
    assert torch.equal(data.x[0], as_tensor(first))
    assert torch.equal(data.x_test[0], as_tensor(last))
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [1])
    draw(root / test / "bees" / "1.png", seed=3)
    with pytest.raises(UnknownNameError, match="class folder of the test images 'bees'; did you"):
        load_dataset("folder", 5, root=str(root))


def test_a_missing_or_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(MissingDataError, match="needs images in CLASS/ or DOMAIN/CLASS/"):
        load_dataset("folder", 0, root=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="'folder' needs a value for root"):
        load_dataset("folder", 0)
    with pytest.raises(ValueError, match="test_share between 0 and 1, but got 1"):
        load_dataset("folder", 0, root=".", test_share=1.0)
    with pytest.raises(ValueError, match="channels of 1 or 3, not 4"):
        load_dataset("folder", 0, root=".", channels=4)


def test_a_subset_of_a_folder(domains):
    data = load_dataset("folder", 0, root=str(domains), size=8, train=6, test=3)
    assert data.y.bincount().tolist() == [2, 2, 2]
    assert data.y_test.bincount().tolist() == [1, 1, 1]
    assert len(data.groups) == 6


def test_imagenet(tmp_path, draw):
    root = tmp_path / "imagenet"
    for label in ("n02", "n01"):
        for number in range(3):
            draw(root / "train" / label / f"{label}_{number}.JPEG", size=(30, 40), seed=number)
        draw(root / "val" / label / "ILSVRC2012_val_1.JPEG", size=(50, 20))
    data = load_dataset("imagenet", 0, root=str(tmp_path), size=16)
    assert data.shape == (3, 16, 16)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.y_test.tolist() == [0, 1]
    assert data.transform.mean == (0.485, 0.456, 0.406)
    assert load_dataset("imagenet", 0, root=str(root), size=16, train=4).y.tolist() == [0, 0, 1, 1]
    (root / "val" / "n01" / "ILSVRC2012_val_1.JPEG").rename(root / "val" / "flat.JPEG")
    (root / "val" / "n01").rmdir()
    with pytest.raises(ValueError, match=r"one folder per class in .*val, named as the 2 in"):
        load_dataset("imagenet", 0, root=str(root))


def test_the_error_of_a_missing_imagenet_names_the_folders_searched(tmp_path):
    with pytest.raises(MissingDataError, match=f"needs a folder with train and val.*{tmp_path}"):
        load_dataset("imagenet", 0)


@pytest.fixture
def tiny(tmp_path, draw):
    root = tmp_path / "made" / "tiny-imagenet-200"
    for seed, label in enumerate(("n3", "n7")):
        for number in range(2):
            draw(root / "train" / label / "images" / f"{label}_{number}.JPEG", (64, 64), seed)
    draw(root / "val" / "images" / "val_0.JPEG", (64, 64))
    draw(root / "val" / "images" / "val_1.JPEG", (64, 64), mode="L")
    (root / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn7\t0\t0\t62\t57\nval_1.JPEG\tn3\t52\t55\t57\t59\n"
    )
    return root


def assert_is_tiny(data):
    assert data.shape == (3, 64, 64)
    assert (data.y.tolist(), data.y_test.tolist(), data.classes) == ([0, 0, 1, 1], [1, 0], 2)


def zipped(root):
    path = root.parent.parent / "there" / "tiny-imagenet-200.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for file in root.rglob("*.*"):
            archive.write(file, file.relative_to(root.parent))
    shutil.rmtree(root)
    return path


def test_tiny_imagenet_from_a_folder(tiny):
    assert_is_tiny(load_dataset("tiny_imagenet", 0, root=str(tiny.parent)))
    assert_is_tiny(load_dataset("tiny_imagenet", 0, root=str(tiny)))


def test_tiny_imagenet_from_a_zip(tiny, home):
    path = zipped(tiny)
    assert_is_tiny(load_dataset("tiny_imagenet", 0, root=str(path.parent)))
    path.unlink()
    assert_is_tiny(load_dataset("tiny_imagenet", 0))
    assert (home / "tiny-imagenet-200" / "train").is_dir()


def test_a_damaged_zip_is_named(tiny):
    path = zipped(tiny)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DamagedDataError, match=f"{path} is damaged"):
        load_dataset("tiny_imagenet", 0, root=str(path.parent))


def test_a_folder_that_only_looks_like_imagenet_needs_a_root(tmp_path, draw):
    draw(tmp_path / "work" / "data" / "train" / "a" / "0.JPEG")
    draw(tmp_path / "work" / "data" / "val" / "a" / "0.JPEG")
    with pytest.raises(MissingDataError, match="'imagenet' needs a folder"):
        load_dataset("imagenet", 0)
    assert load_dataset("imagenet", 0, root="data").classes == 1


def test_tiny_imagenet_is_downloaded(tiny, home, monkeypatch):
    path = zipped(tiny)
    monkeypatch.setattr(imagenet, "URL", path.as_uri())
    with pytest.raises(MissingDataError, match=r"Tried file:.*MD5 is .* but must be"):
        load_dataset("tiny_imagenet", 0)
    assert not [path for path in home.iterdir() if path.suffix != ".lock"]
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(imagenet, "MD5", md5)
    assert_is_tiny(load_dataset("tiny_imagenet", 0))


@pytest.fixture
def streets(tmp_path, draw):
    """Three cities to train on and two to test on, two images each."""
    root = tmp_path / "cityscapes"
    rng = np.random.default_rng(0)
    for split, cities in (("train", ("aachen", "bochum", "ulm")), ("val", ("lindau", "munster"))):
        for city in cities:
            for number in range(2):
                name = f"{city}_{number:06}_000019"
                draw(root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", (16, 32))
                ids = rng.integers(0, 34, (16, 32), dtype=np.uint8)
                ids[0] = np.arange(32)
                path = root / "gtFine" / split / city / f"{name}_gtFine_labelIds.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(ids).save(path)
    return root


def test_cityscapes_has_a_class_for_every_pixel(streets):
    data = load_dataset("cityscapes", 0, root=str(streets), size=[16, 32])
    assert data.segmentation
    assert data.classes == 19
    assert data.x.shape == (6, 3, 16, 32)
    assert data.y.shape == (6, 16, 32)
    assert data.groups.tolist() == ["aachen"] * 2 + ["bochum"] * 2 + ["ulm"] * 2
    assert len(data.x_test) == 4
    # The ids of the published table: road 7, sidewalk 8, building 11, sky 23, person 24, car 26.
    row = data.y[0, 0].tolist()
    assert [row[i] for i in (7, 8, 11, 23, 24, 26, 31)] == [0, 1, 2, 10, 11, 13, 16]
    assert {row[i] for i in range(32) if i not in LABELS} == {255}
    _, labels = next(data.test_batches())
    assert labels.min() == -100
    assert labels.max() <= 18


def test_cityscapes_resizes_masks_without_mixing_classes(streets):
    rows = np.repeat(np.array([[7], [33]], np.uint8), 8, axis=0).repeat(32, axis=1)
    for path in streets.glob("gtFine/*/*/*"):
        Image.fromarray(rows).save(path)
    data = load_dataset("cityscapes", 0, root=str(streets.parent), size=(5, 8))
    assert data.y.shape == (6, 5, 8)
    assert data.y.unique().tolist() == [0, 18]  # road and bicycle, and nothing between


def test_cityscapes_is_cropped_for_training(streets):
    data = load_dataset(
        "cityscapes", 0, root=str(streets), size=(16, 32), crop=[8, 12], augment="flip"
    )
    x, y = data.training_batch(np.arange(4), np.random.default_rng(0))
    assert (x.shape, y.shape) == ((4, 3, 8, 12), (4, 8, 12))
    with pytest.raises(ValueError, match="a crop within it"):
        Cityscapes(size=(8, 8), crop=(4, 9))


def test_clients_are_the_cities(streets):
    data = load_dataset("cityscapes", 0, root=str(streets), size=(8, 16), test=2)
    parts = build_federation(data, "natural", Plan(2), clients=3, seed=0)
    assert [set(data.groups[part]) for part in parts.parts] == [{"aachen"}, {"bochum"}, {"ulm"}]
    # Test cities differ from training cities: each client is tested on its classes.
    assert data.groups_test is None
    assert sorted(np.concatenate(parts.test_parts).tolist()) == [0, 1]


def test_cityscapes_without_a_mask_names_it(streets):
    missing = next(streets.glob("gtFine/val/munster/*"))
    missing.unlink()
    with pytest.raises(MissingDataError, match=f"needs its labels at {missing}"):
        load_dataset("cityscapes", 0, root=str(streets))
