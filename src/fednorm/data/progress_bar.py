"""A progress bar for downloads and decoding: shown on a terminal, silent everywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

Advance: TypeAlias = Callable[[int], None]


@contextmanager
def show_progress(what: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Show a progress bar; the block calls the yielded function with each amount done."""
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
