"""Flower without its telemetry and its look for updates; tests are skipped where it is missing."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

if not find_spec("flwr"):
    pytest.skip("Flower is not installed: pip install '.[flower]'", allow_module_level=True)


@pytest.hookimpl(tryfirst=True)  # before tests are put in order
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.flower)
