"""One thread: tests run side by side, and their models are tiny."""

import torch
from hypothesis import settings


def pytest_configure(config):
    del config
    torch.set_num_threads(1)
    settings.register_profile("fednorm", deadline=None, max_examples=50)
    settings.load_profile("fednorm")
