"""Data sets whose content is known: got once, checked, and the same everywhere."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

from fednorm.data.cache import decoded_home, roots
from fednorm.data.dataset import Dataset
from fednorm.data.images import Images, dataset
from fednorm.data.store import Arrays, DamagedDataError, digest, save, stored
from fednorm.data.ways import Way, first


@dataclass(frozen=True, slots=True)
class Known(Images, ABC):
    """A data set that a run gets for itself where it is missing."""

    classes: ClassVar[int]
    shapes: ClassVar[dict[str, tuple[int, ...]]]  # of the samples
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]  # what a user can put in place by hand
    sums: ClassVar[dict[str, str]]  # SHA-256 of each decoded array

    @abstractmethod
    def copies(self, folders: list[Path]) -> Iterator[Way]:
        """Yield the copies on this machine."""

    @abstractmethod
    def remote(self, scratch: Path) -> Iterator[Way]:
        """Yield the ways to fetch it; `scratch` is a folder for what is downloaded."""

    def load(self, seed: int) -> Dataset:
        """Return the images; they are fetched if this machine has none."""
        arrays = stored(decoded_home() / self.name, self._get)
        look = self.look(self.mean, self.std, arrays["x"].shape[-1])
        return dataset(self.name, self.some(arrays, seed), classes=self.classes, look=look)

    def _get(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # A root that is given is where the copy must be: nothing is downloaded past it.
            remote = self.remote(Path(scratch)) if self.root is None else ()
            ways = chain(self.copies(roots(self.root)), remote)
            arrays = first(self.name, ways, self.files, self._check)
        save(folder, arrays)

    def _check(self, arrays: Arrays) -> None:
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape:
                raise DamagedDataError(f"{name} has shape {arrays[name].shape}, not {shape}")
        for name, expected in self.sums.items():
            if digest(arrays[name]) != expected:
                raise DamagedDataError(f"{name} does not have the SHA-256 {expected}")
