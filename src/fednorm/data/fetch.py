"""Downloads that are whole or not there: written beside their place, checked, then renamed."""

import hashlib
import os
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from fednorm.data.progress import bar
from fednorm.data.store import DamagedDataError

TIMEOUT = 8.0  # seconds without an answer
_CHUNK = 1 << 20
_AGENT = {"User-Agent": "fednorm (+https://pypi.org/project/fednorm)"}


def download(url: str, folder: Path, md5: str) -> Path:
    """Return the file that a URL names, put into a folder; it has this MD5, or an error comes.

    Nothing is left behind if the download breaks off or is not what it should be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / url.rpartition("/")[2]
    request = urllib.request.Request(url, headers=_AGENT)  # noqa: S310 (URLs are our constants)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{target.name}-", delete=False) as part:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310 (as above)
                came = _copy(answer, part, target.name)
            _check(came, md5)
            part.flush()
            os.fsync(part.fileno())
        except BaseException as error:
            part.close()
            Path(part.name).unlink()
            if isinstance(error, HTTPException):
                raise OSError(f"the connection broke: {error!r}") from error
            raise
    Path(part.name).replace(target)
    return target


def _copy(answer: Any, part: IO[bytes], name: str) -> str:
    """Write what comes into a file and return its MD5; fewer bytes than announced are an error."""
    length = answer.headers.get("Content-Length")
    total = int(length) if length else None
    result, done = hashlib.md5(usedforsecurity=False), 0
    with bar(f"downloading {name}", total, in_bytes=True) as advance:
        while chunk := answer.read(_CHUNK):
            part.write(chunk)
            result.update(chunk)
            done += len(chunk)
            advance(len(chunk))
    if total is not None and done != total:
        raise ConnectionError(f"the connection broke after {done} of {total} bytes")
    return result.hexdigest()


def _check(came: str, md5: str) -> None:
    if came != md5:
        raise DamagedDataError(f"MD5 is {came}, but must be {md5}; the file is not used")
