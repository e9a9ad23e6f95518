"""A machine without data, network or npm; images in the layouts that data sets come in."""

import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of all data sets, empty."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "home"))
    monkeypatch.delenv("FEDNORM_DATA_LIMIT", raising=False)
    real = urllib.request.urlopen

    def local_only(request, **options):
        if not request.full_url.startswith("file:"):
            raise urllib.error.URLError("no network in tests")
        return real(request, **options)

    monkeypatch.setattr("urllib.request.urlopen", local_only)
    return tmp_path / "home"


@pytest.fixture
def draw():
    """Write images of noise, and return their pixels as height x width x channels."""

    def write(path, size=(8, 8), seed=0, mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = size if mode == "L" else (*size, 3)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return pixels

    return write
