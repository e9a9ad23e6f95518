"""Flower without its telemetry and its look for updates; tests are skipped where it is missing."""

import os
from importlib.util import find_spec

import pytest

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

if not find_spec("flwr"):
    pytest.skip("Flower is not installed: pip install fednorm[flower]", allow_module_level=True)
