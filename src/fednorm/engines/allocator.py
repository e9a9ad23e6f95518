"""Memory that is given back and asked for again costs time: large steps keep it instead.

By default the C library returns every buffer above 32 MB to the system at once, and the system
must clear each page anew when the next layer asks for it. `benchmarks/allocator.py` measures it.
Set for processes of the command line only, never for a user's own; FEDNORM_ALLOCATOR=off leaves it.
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names in malloc.h
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 1 << 28}  # bytes


def keep_memory() -> bool:
    """Let this process keep what it has; return whether that was possible and wanted."""
    if os.environ.get("FEDNORM_ALLOCATOR") == "off" or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in _SETTINGS.items())
