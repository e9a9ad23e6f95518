"""Under what a result is made: versions, machine type, commit, cores and threads."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

_PACKAGES = ("fednorm", "torch", "numpy")


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_environment() -> dict[str, str]:
    """Return versions, platform and, in a checkout, the commit."""
    versions = {package: version(package) for package in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {count_cores()} cores",
        **_find_commit(),
    }


def _find_commit() -> dict[str, str]:
    source = Path(__file__).parent
    try:
        command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
        tracked = ["git", "-C", str(source), "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, check=True, capture_output=True)  # noqa: S603 (fixed command)
        found = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": found.stdout.strip()}


def has_bfloat16() -> bool:
    """Return whether the processor multiplies in bfloat16 by itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 (no other way)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Compute with so many threads, and leave the process as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
