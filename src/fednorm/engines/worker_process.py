"""How worker processes start, and what they share with their parent.

Importing torch and fednorm takes seconds. On Linux a server process does it once, while it has no
threads, and every worker is a fork of it: those of later pools too, and those that replace dead
ones. What a fork would have from the server, it gets from its parent instead: the environment,
where output goes, and NumPy's random state, which must not be the same in all. Elsewhere each
worker imports for itself; on macOS, libraries of the system do not survive a fork.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from multiprocessing import forkserver, reduction, resource_tracker, util
from typing import Any

import numpy as np
from torch import multiprocessing

from fednorm.names import user_directories
from fednorm.system import TemporaryFolder, keep_memory

_MODULES = ["torch", "fednorm.engines.processes", "fednorm.experiment.process_pool"]
_LAST = -100  # as multiprocessing has it for its own folder
UNGUARDED = 86  # exit status
_OUTPUTS = (1, 2)  # file descriptors of stdout and stderr


def prepare_context() -> Any:
    """Return the multiprocessing context in which worker processes start."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_MODULES)
    _own_folder()
    resource_tracker.ensure_running()  # when it starts, it unblocks interrupts
    # The server imports from where this process does, not from the working folder.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    before = dict(os.environ)
    with block_interrupts():
        os.environ.update(path)
        try:
            forkserver.ensure_running()
        finally:
            _set_environment(before)
    return context


@cache
def _own_folder() -> TemporaryFolder:
    """Let multiprocessing name its files so that they can be removed if this process is killed."""
    folder = TemporaryFolder()
    # Not at the end of weak references, but after multiprocessing has removed its own files.
    removal: Any = folder.remove.detach()
    util.Finalize(None, removal[1], removal[2], exitpriority=_LAST)
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    config.setdefault("tempdir", str(folder.path))
    config["semprefix"] = f"/{folder.path.name}"
    return folder


@contextlib.contextmanager
def block_interrupts() -> Iterator[None]:
    """Let processes that start in the block never see Ctrl-C: it is for their parent."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Surroundings:
    """Environment and outputs of the process in which it is pickled, to be set in another.

    So are the folders from which the user's classes were imported, as soon as it is unpickled:
    what follows may be their objects.
    """

    def __init__(
        self,
        folders: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        outputs: Mapping[int, Any] | None = None,
    ) -> None:
        self.environment, self.outputs = environment, outputs or {}
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]

    def __reduce__(self) -> tuple[type["Surroundings"], tuple[Any, ...]]:
        folders = tuple(user_directories)
        if sys.platform != "linux":  # a worker inherits the rest
            return Surroundings, (folders,)
        outputs = {number: reduction.DupFd(number) for number in _OUTPUTS if _is_open(number)}
        return Surroundings, (folders, dict(os.environ), outputs)

    def adopt(self) -> None:
        """Set them in this process."""
        if self.environment is not None:
            _set_environment(self.environment)
        for number, received in self.outputs.items():
            copy = received.detach()
            if copy != number:
                os.dup2(copy, number)
                os.close(copy)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def end_repeated_import() -> None:
    """End a worker that runs the user's script again, as that has no `__main__` guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def check_guard(exitcodes: Iterable[int | None]) -> None:
    """End the script, with a sentence alone, if workers ended for lack of a `__main__` guard."""
    if UNGUARDED in exitcodes:
        raise SystemExit(
            "worker processes import the script that starts them, so its calls must stand under "
            'if __name__ == "__main__": (or use workers=1).'
        ) from None


def start_worker(surroundings: Surroundings) -> None:
    """Set up a worker process: Ctrl-C is for the parent, and memory is kept."""
    surroundings.adopt()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    np.random.seed()  # noqa: NPY002 (of a model or transform that draws from NumPy's own state)
    keep_memory()
