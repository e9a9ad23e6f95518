"""Ctrl-C, or the system's wish that the program ends (SIGTERM), between rounds.

Python raises KeyboardInterrupt wherever the program happens to be, and where that is a destructor
or a callback from compiled code the exception is lost. So the first Ctrl-C only leaves a mark that
is looked at after each round; the second one interrupts at once.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fednorm.experiment.run import Event, OnRound

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def between_rounds(on_round: OnRound) -> Iterator[OnRound]:
    """Return `on_round` with a look at the mark that Ctrl-C leaves."""
    if threading.current_thread() is not threading.main_thread():
        yield on_round  # only the main thread may handle signals
        return
    pressed = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()
        sys.stderr.write("Stopping after this round; Ctrl-C again stops at once.\n")

    def watched(event: Event) -> None:
        on_round(event)
        if pressed.is_set():
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield watched
    finally:
        for number, old in before.items():
            signal.signal(number, old)
