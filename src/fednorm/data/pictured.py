"""Data sets of picture files: chosen by their names, then decoded and kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fednorm.data.dataset import Dataset
from fednorm.data.images import Images, dataset
from fednorm.data.look import Look
from fednorm.data.pictures import Decoder, Files, decoded
from fednorm.data.places import pictures_in
from fednorm.data.ways import MissingDataError


@dataclass(frozen=True, slots=True)
class Listing:
    """The picture files of a data set."""

    train: Files
    test: Files
    classes: int


@dataclass(frozen=True, slots=True)
class Pictured(Images, ABC):
    """A folder of picture files. Only those that are used are decoded, once for each choice."""

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # of ImageNet
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    @abstractmethod
    def listing(self, seed: int) -> Listing:
        """Return all picture files."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return how they are read."""

    def batches(self, height: int, width: int) -> Look:
        """Return how batches of such pictures are made."""
        return self.look(self.mean, self.std, min(height, width))

    def load(self, seed: int) -> Dataset:
        """Return the pictures that are asked for."""
        listing = self.listing(seed)
        train = self._used(listing.train, seed, test=False)
        test = self._used(listing.test, seed, test=True)
        arrays = decoded(self.name, train, test, self.decoder())
        look = self.batches(*arrays["x"].shape[-2:])
        return dataset(self.name, arrays, classes=listing.classes, look=look)

    def _used(self, files: Files, seed: int, *, test: bool) -> Files:
        if not files.paths:
            split = "test" if test else "training"
            raise MissingDataError(f"data set {self.name!r} found no {split} pictures.")
        # Masks are not known before they are read: those are chosen evenly by their group.
        kinds = files.groups if isinstance(files.labels, list) else files.labels
        return files.take(self.chosen(np.asarray(kinds), seed, test=test))


def of_classes(classes: Iterable[tuple[Path, int]]) -> Files:
    """Return the pictures of folders, each with the class of its folder."""
    found = [(path, label) for folder, label in classes for path in pictures_in(folder)]
    return Files([path for path, _ in found], np.array([label for _, label in found], np.int64))
