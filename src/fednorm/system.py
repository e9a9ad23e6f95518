"""The machine: versions, cores, threads, memory, and files written whole or not at all."""

import contextlib
import ctypes
import errno
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from io import BufferedReader
from pathlib import Path
from typing import IO

from fednorm.errors import ConfigError, DamagedDataError, DiskError

try:
    import fcntl
except ImportError:  # on Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_PACKAGES = ("fednorm", "torch", "numpy")
_FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, or of what a user may have there


def count_cores() -> int:
    """Return the number of cores that this process may use."""
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
    import torch  # noqa: PLC0415 (cores are counted without torch)

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 (no other way)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads within the block."""
    import torch  # noqa: PLC0415 (as above)

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` to be replaced by what the block writes; an error in it leaves `path` as it was.

    The bytes go to another file of the same folder, which is renamed once they are on the disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "notes.txt") as file:
    ...         count = file.write(b"whole")
    ...     [path.name for path in Path(folder).iterdir()]
    ['notes.txt']
    """
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with explain_full_disk(path.parent):
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Let the error of a full disk name the folder that the block writes to.

    >>> with explain_full_disk(Path("results/ours")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fednorm.errors.DiskError: 'results/ours' cannot be written to: No space left on device; ...
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskError(
            f"{str(folder)!r} cannot be written to: {error.strerror}; make room and give the same "
            "command again."
        ) from error


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file to be read; refuse a pipe or device, which might never end.

    >>> with open_regular(Path("/dev/zero")) as file:
    ...     pass
    Traceback (most recent call last):
    fednorm.errors.DamagedDataError: /dev/zero is not a regular file; remove it.
    """
    # Without O_NONBLOCK, to open a pipe would wait for a writer.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise DamagedDataError(f"{path} is not a regular file; remove it.")
        yield file


OURS = "fednorm-"
_LOCK, _SEMAPHORES = ".lock", Path("/dev/shm")  # noqa: S108 (Linux keeps semaphores there)


class TemporaryFolder:
    """A temporary folder, removed with its last reference, or after the death of its process.

    Its lock ends with the process, however that ends: a folder that can be locked is a leftover.

    >>> folder = TemporaryFolder()
    >>> folder.path.name.startswith("fednorm-")
    True
    """

    def __init__(self) -> None:
        remove_leftovers()
        new = Path(tempfile.mkdtemp(prefix=f".{OURS}"))
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(lock)
        # Only with this name it can be a leftover.
        self.path = new.rename(new.with_name(new.name.removeprefix(".")))
        self.remove = weakref.finalize(self, _remove_folder, self.path, lock)


def remove_leftovers() -> None:
    """Remove temporary folders and semaphores of this user's runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{OURS}*") if fcntl else ():
        with contextlib.suppress(OSError):  # not ours, in use, or gone in the meantime
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                _lock(lock)
            except OSError:
                os.close(lock)
                continue
            for semaphore in _SEMAPHORES.glob(f"sem.{path.name}-*"):
                semaphore.unlink(missing_ok=True)
            _remove_folder(path, lock)


def _lock(number: int) -> None:
    if fcntl:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def read_cpu_seconds(process: int) -> float | None:
    """Return the time that a process has computed, or None where the system does not tell."""
    facts = _read_process(process)
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK") if facts else None


def is_stopped(process: int) -> bool:
    """Return whether a process was stopped by a signal; False where the system does not tell."""
    return _read_process(process)[:1] == ["T"]


def _read_process(number: int) -> list[str]:
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # from its state on


_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_AVAILABLE = Path("/proc/meminfo")
_FORGET_PEAK = "5"
_PROCESS = 400_000_000  # bytes of a worker that has loaded its libraries and nothing else
_GIGABYTE = 1e9
_KILOBYTE = 1024  # as Linux counts


@dataclass
class PeakMemory:
    """The highest memory of this process within a block, beyond what it had before; in bytes."""

    bytes: int | None = None


@contextmanager
def measure_peak() -> Iterator[PeakMemory]:
    """Measure a block; the result is None where the system does not tell."""
    found = PeakMemory()
    before = _read_kilobytes(_STATUS, "VmRSS")
    try:
        _REFS.write_text(_FORGET_PEAK)
    except OSError:
        before = None
    yield found
    after = _read_kilobytes(_STATUS, "VmHWM")
    if before is not None and after is not None:
        found.bytes = _KILOBYTE * max(0, after - before)


def _read_kilobytes(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def available_memory() -> int | None:
    """Return how many bytes can be had without pushing others out."""
    found = _read_kilobytes(_AVAILABLE, "MemAvailable")
    return None if found is None else _KILOBYTE * found


@dataclass
class MemoryEstimate:
    """What the strategies of a comparison need at most, each by itself."""

    limit: int  # bytes of client states that are held in memory
    step: int = 0  # bytes at the peak of a step, with the data
    kept: int = 0  # bytes that all clients keep between rounds
    news: int = 0  # bytes that the clients of a round send, and keep instead of what they kept
    measured: bool = field(default=True)

    def add(self, step: int | None, kept: int, news: int = 0) -> None:
        """Add a strategy."""
        self.measured = self.measured and step is not None
        self.step, self.kept = max(self.step, step or 0), max(self.kept, kept)
        self.news = max(self.news, news)

    def check(self, workers: int) -> None:
        """Refuse a comparison that would not fit, with the numbers."""
        free = available_memory()
        clients = min(self.kept, self.limit) + self.news
        run = self.step + clients
        total = run if workers == 1 else workers * (run + _PROCESS)
        if not self.measured or free is None or total <= free:
            return
        at_once = f"{workers} processes at once" if workers > 1 else "a run"
        raise ConfigError(
            f"{at_once} would need {total / _GIGABYTE:.1f} GB of memory, but {free / _GIGABYTE:.1f}"
            f" GB are available: {self.step / _GIGABYTE:.1f} GB for data, model and a step of each "
            f"run, {clients / _GIGABYTE:.1f} GB for what its clients send and keep. Use fewer "
            "--workers, smaller batches, fewer clients, or a strategy without personal layers."
        )


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names in malloc.h
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 28}  # bytes


def keep_memory() -> bool:
    """Let this process keep what it has; return whether that was possible and wanted."""
    if os.environ.get("FEDNORM_ALLOCATOR") == "off" or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in _SETTINGS.items())


def release_memory() -> None:
    """Give memory that is free back to the system, in the heaps of all threads."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
