"""What the peers share: the command line, a client's batches, and the clock."""

import importlib
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from works import WORKS, Work, as_floats


def arguments(threads: int = 2) -> tuple[Work, int]:
    """Return the work and the rounds of the command line; a third argument sets the threads."""
    torch.set_num_threads(int(sys.argv[3]) if sys.argv[3:] else threads)
    return WORKS[sys.argv[1]], int(sys.argv[2])


def batches(work: Work, x: Tensor, y: Tensor, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a client trains on in one round: a batch for every step."""
    for _ in range(work.steps):
        chosen = client * work.held + torch.randperm(work.held)[: work.batch]
        yield as_floats(x[chosen]).contiguous(memory_format=torch.channels_last), y[chosen]


class Clock:
    """Writes the seconds since it was made or last asked."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def lap(self) -> None:
        """End a round and begin the next."""
        now = time.perf_counter()
        print(now - self.start, flush=True)
        self.start = now


def with_statistics_as_parameters(model: nn.Module) -> nn.Module:
    """Make running statistics frozen parameters, for peers that average nothing else."""
    for module in model.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            if value.is_floating_point():
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model


def prepare_torchvision() -> None:
    """Let torchvision be imported without its kernels, which no peer needs here.

    From PyPI it is built for CUDA; next to a CPU build of torch it lacks two operators.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
