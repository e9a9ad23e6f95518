"""One thread, because tests run side by side and their models are tiny; a machine without data."""

import sys
import urllib.error
import urllib.request

import pytest
import torch
from hypothesis import settings

from fednorm import names
from fednorm.models import deeplabv3plus


def pytest_configure(config):
    del config
    torch.set_num_threads(1)
    settings.register_profile("fednorm", deadline=None, max_examples=50)
    settings.load_profile("fednorm")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items):
    """Put long tests first, so that the last ones to end are short.

    Short tests of a module run in one process, and so do tests that share a fixture of their
    module, which is made once then.
    """
    items.sort(key=lambda item: [not item.get_closest_marker(mark) for mark in ("slow", "flower")])
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        made = fixtures.name2fixturedefs.values() if fixtures else ()
        shares = any(found.scope == "module" for several in made for found in several)
        if shares or not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {shares}"))


@pytest.fixture(autouse=True)
def _forget_user_modules(tmp_path_factory):
    """Let no test know the modules that another one imported from its folder."""
    before, folders = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        spec = getattr(sys.modules[name], "__spec__", None)
        # A folder without __init__.py is a module without a file.
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        if any(place and place.startswith(folders) for place in places):
            del sys.modules[name]
    names.user_directories.clear()


@pytest.fixture
def narrow_networks(monkeypatch):
    """Make the published networks narrow: all their layers, with few channels each."""
    monkeypatch.setattr("fednorm.models.resnet.CIFAR_WIDTHS", (8, 8, 16))
    monkeypatch.setattr("fednorm.models.resnet.IMAGENET_WIDTHS", (8, 8, 16, 16))
    monkeypatch.setattr("fednorm.models.deeplabv3plus.WIDTH", 32)
    monkeypatch.setattr("fednorm.models.deeplabv3plus.LOW_WIDTH", 8)
    stages = ((1, 16), (2, 24), (2, 16), (2, 16), (2, 16), (2, 24), (2, 320))
    known = zip(stages, deeplabv3plus.STAGES, strict=True)
    narrow = tuple((*new, depth, stride) for new, (*_, depth, stride) in known)
    monkeypatch.setattr(deeplabv3plus, "STAGES", narrow)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return the folder of all data sets, empty, on a machine without network and npm."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "home"))
    monkeypatch.delenv("FEDNORM_DATA_LIMIT", raising=False)
    monkeypatch.setattr("fednorm.data.datasets.mnist.DEBIAN", tmp_path / "debian")
    real = urllib.request.urlopen

    def local_only(request, **options):
        if not request.full_url.startswith("file:"):
            raise urllib.error.URLError("no network in tests")
        return real(request, **options)

    monkeypatch.setattr("urllib.request.urlopen", local_only)
    return tmp_path / "home"
