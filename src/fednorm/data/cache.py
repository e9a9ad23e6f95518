"""Where data sets are kept on this machine, and how much of them is held in memory."""

import os
from pathlib import Path

_GIGABYTE = 10**9
_DEFAULT_LIMIT = 4.0


def home() -> Path:
    """Return the folder of all data sets: `FEDNORM_DATA`, or `fednorm` in the user's cache."""
    if chosen := os.environ.get("FEDNORM_DATA"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "fednorm"


def decoded_home() -> Path:
    """Return the folder of what was decoded; no other file of a user's is ever in it."""
    return home() / "decoded"


def roots(root: str | None) -> list[Path]:
    """Return where a copy made by another library is looked for: only in `root`, if it is given."""
    if root is not None:
        return [Path(root).expanduser()]
    return [home(), Path("data"), Path.home() / ".keras" / "datasets"]


def limit() -> float:
    """Return how many bytes of samples are read into memory; more are mapped from their file."""
    text = os.environ.get("FEDNORM_DATA_LIMIT", str(_DEFAULT_LIMIT))
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise ValueError(
            f"FEDNORM_DATA_LIMIT must be a number of gigabytes such as {_DEFAULT_LIMIT:g}, "
            f"but is {text!r}."
        )
    return gigabytes * _GIGABYTE
