"""Where the folder of a data set is, and what lies in it."""

import os
from pathlib import Path

from fednorm.data.cache import home, roots
from fednorm.data.ways import MissingDataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")


def located(data: str, root: str | None, markers: tuple[str, ...], below: tuple[str, ...]) -> Path:
    """Return the folder that holds every marker: `root`, or one of these names below a root.

    Args:
        data: the name of the data set.
        root: where the user says it is.
        markers: what the folder must hold.
        below: the names that it may have below a root.
    """
    inner = below if root is None else ("", *below)  # elsewhere the name must tell
    looked = [place / name for place in roots(root) for name in inner]
    for folder in looked:
        if all((folder / marker).exists() for marker in markers):
            return folder.resolve()
    needed = " and ".join(markers)
    raise MissingDataError(
        f"data set {data!r} needs a folder with {needed}, but there is none at "
        f"{', '.join(map(str, looked))}; set the data set's root to it, or put it at "
        f"{home() / below[0]}."
    )


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones do not count."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def pictures_in(folder: Path) -> list[Path]:
    """Return the picture files of a folder, sorted by name."""
    with os.scandir(folder) as entries:
        names = sorted(
            e.name
            for e in entries
            if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".")
        )
    return [folder / name for name in names]
