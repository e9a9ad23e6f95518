"""Whether a comparison fits into memory, known before it starts.

One step of every strategy is tried before the first run. What it took at its peak is what each
process will take, and beside it what clients keep between their rounds and what they send in one.
Where the system does not tell (only Linux does), nothing is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fednorm.engines.kept import LIMIT
from fednorm.experiment.load import ConfigError

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

    step: int = 0  # bytes at the peak of a step, with the data
    kept: int = 0  # bytes that all clients keep between rounds
    news: int = 0  # bytes that the clients of a round send, and keep instead of what they kept
    limit: int = LIMIT  # of those in memory; the rest lies on disk
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
