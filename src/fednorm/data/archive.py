"""Files out of a tar archive, read without unpacking it."""

import tarfile


def member(archive: tarfile.TarFile, name: str) -> bytes:
    """Return one file of an archive."""
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise FileNotFoundError(f"the archive has no file {name}")
    return file.read()
