"""Ctrl-C, or SIGTERM, between rounds.

Python raises KeyboardInterrupt wherever the program happens to be; in a destructor or a callback
from compiled code the exception is lost. So the first Ctrl-C only sets a flag, which a run checks
after each round; the second one interrupts at once.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catch_interrupts() -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C sets; only the main thread can catch signals."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()
        sys.stderr.write("Stopping after this round; Ctrl-C again stops at once.\n")

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
