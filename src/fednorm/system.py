"""The machine: its cores, the threads of torch, and files written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads within the block."""
    import torch  # noqa: PLC0415 (slow to import; not every command computes)

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
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
