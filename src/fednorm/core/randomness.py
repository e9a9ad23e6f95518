"""Randomness of a client's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def isolated_rng(seed: int, model: nn.Module) -> Iterator[None]:
    """Give dropout and its like a generator of their own; the caller's is left untouched."""
    device = next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed costs more than a small step
        if devices:
            torch.get_device_module(device).manual_seed(seed)
        yield
