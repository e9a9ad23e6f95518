"""Under what a result is made: versions, machine type, commit, cores and threads."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from fednorm.system import count_cores

_PACKAGES = ("fednorm", "torch", "numpy")


def environment() -> dict[str, str]:
    """Return versions, platform and, in a checkout, the commit."""
    versions = {package: version(package) for package in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {count_cores()} cores",
        **_commit(),
    }


def _commit() -> dict[str, str]:
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
