"""`python -m fednorm` is `fednorm`: the command line, which Ctrl-C ends even during imports."""

import os
import signal
import sys
from types import FrameType

_TEXT = "Interrupted; the same command starts again and keeps what is finished.\n"
_CODE = 130


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from fednorm.cli import main as run  # noqa: PLC0415 (Ctrl-C may come while it is imported)

        run()
    except KeyboardInterrupt:
        sys.stderr.write(_TEXT)
        sys.exit(_CODE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process if a module is being imported.

    Some packages catch the exception while they are imported, and fail later and worse.
    """
    reached = frame
    while reached is not None:
        if reached.f_code.co_filename.startswith("<frozen importlib"):
            sys.stderr.write(_TEXT)
            sys.stderr.flush()
            os._exit(_CODE)
        reached = reached.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
