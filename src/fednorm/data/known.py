"""Data sets whose content is known: got once, checked, and the same everywhere."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fednorm.data.cache import home
from fednorm.data.dataset import Dataset
from fednorm.data.images import Images
from fednorm.data.store import Arrays, DamagedDataError, digest, save, stored
from fednorm.data.ways import Way, first


@dataclass(frozen=True, slots=True)
class Known(Images, ABC):
    """A data set that a run gets for itself where it is missing."""

    classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]  # what a user can put in place by hand
    sources: ClassVar[tuple[str, ...]]
    sums: ClassVar[dict[str, str]]  # SHA-256 of each decoded array

    @abstractmethod
    def ways(self) -> Iterator[Way]:
        """Yield the ways to get it, copies on this machine first."""

    def load(self, seed: int) -> Dataset:
        """Return the images; they are fetched if this machine has none."""
        arrays = stored(home() / self.name, self._fetch)
        look = self.look(self.mean, self.std, arrays["x"].shape[-1])
        return self.dataset(arrays, seed, classes=self.classes, look=look)

    def _fetch(self, folder: Path) -> None:
        save(folder, first(self.name, self.ways(), self.files, self._check))

    def _check(self, arrays: Arrays) -> None:
        for name, expected in self.sums.items():
            if digest(arrays[name]) != expected:
                raise DamagedDataError(f"{name} does not have the SHA-256 {expected}")
