"""Data sets of the Hugging Face hub, or of files that its library reads.

Needs the extra `hf`. Images and labels are found by the type of their columns. Without a test or
validation part, the same share of every class is held out, chosen by the seed. Pixels are
always normalized with mean 0.5 and standard deviation 0.5.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.lib.format import open_memmap

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.cache import get_decoded_home, load_or_create, make_key, save
from fednorm.data.dataset import Dataset
from fednorm.data.decoder import to_array
from fednorm.data.image_dataset import ImageDataset, check_share, make_dataset, split
from fednorm.data.sources import show_progress
from fednorm.errors import MissingDataError
from fednorm.names import unknown
from fednorm.registry import param

TEST_PARTS = ("test", "validation", "valid", "val")


@dataclass(frozen=True, slots=True)
class HuggingFace(ImageDataset):
    """Images of the Hugging Face hub, by their name there; needs the extra `hf`."""

    name: ClassVar[str] = "hf"
    sources: ClassVar[tuple[str, ...]] = ("Hugging Face: path",)

    path: str = param("", "its name on the hub, or 'imagefolder' with root as the folder")
    config: str | None = param(None, "which of its configurations, if it has several")
    group: str | None = param(None, "the column with the natural group, if it has one")
    size: int | None = param(None, "height and width; none: all images have one size")
    channels: int = param(3, "3 for colour, 1 for grey")
    test_share: float = param(0.2, "share held out for testing, if it has no test part")

    def __post_init__(self) -> None:
        ImageDataset.__post_init__(self)  # with slots, super() finds no class
        check_share(self.name, self.test_share)
        if not self.path:
            raise ValueError("data set 'hf' needs path, the name of a data set on the hub.")

    def load(self, seed: int) -> Dataset:
        """Load the images; the library downloads them if they are missing."""
        parts = load_splits(self.path, self.config, self.root)
        settings = (self.group, self.size, self.channels)
        facts = [(end, part._fingerprint, settings) for end, part in parts.items()]  # noqa: SLF001 (its only identity)

        def write(folder: Path) -> None:
            for end, part in parts.items():
                self._write(folder, part, end)

        arrays = load_or_create(get_decoded_home() / self.name / make_key(facts), write)
        if "x_test" not in arrays:
            rng = make_rng(seed, Stream.HUGGING_FACE_SPLIT)
            arrays = split(arrays, arrays["y"], self.test_share, rng)
        half = (0.5,) * self.channels
        transform = self.make_transform(half, half, min(arrays["x"].shape[-2:]))
        classes = parts[""].features[find_column(parts[""], "ClassLabel")].num_classes
        return make_dataset(self.name, self.subsample(arrays, seed), classes, transform)

    def _write(self, folder: Path, part: Any, end: str) -> None:
        image, label = find_column(part, "Image"), find_column(part, "ClassLabel")
        first = to_array(part[0][image], self.size, self.channels)
        rows = open_memmap(folder / f"x{end}.npy", "w+", np.uint8, (len(part), *first.shape))
        with show_progress(f"decoding {self.path}", len(part)) as advance:
            for number, row in enumerate(part):
                pixels = to_array(row[image], self.size, self.channels)
                if pixels.shape != first.shape:
                    raise ValueError(
                        f"images of data set {self.path!r} must be of one size, but have shapes "
                        f"{first.shape} and {pixels.shape}; set the data set's size."
                    )
                rows[number] = pixels
                advance(1)
        rows.flush()
        save(folder, {f"y{end}": np.array(part[label][:], np.int64)})
        if self.group is not None:
            if self.group not in part.features:
                raise unknown(f"column of data set {self.path!r}", self.group, part.features)
            save(folder, {f"groups{end}": np.array(part[self.group][:]).astype(str)})


def load_splits(path: str, config: str | None, root: str | None) -> Mapping[str, Any]:
    """Return the training part under "" and the test part, if there is one, under "_test"."""
    try:
        datasets = importlib.import_module("datasets")  # an optional extra
    except ModuleNotFoundError:
        raise MissingDataError(
            "data set 'hf' needs the package datasets, which fednorm's extra hf brings; install "
            "it with: pip install datasets"
        ) from None
    try:
        parts = datasets.load_dataset(path, config, data_dir=root)
    except Exception as error:  # the library has dozens of errors without a common base
        raise MissingDataError(
            f"data set {path!r} of Hugging Face cannot be loaded: {error}; check its name, or the "
            "network."
        ) from error
    if "train" not in parts:
        raise MissingDataError(
            f"data set {path!r} of Hugging Face needs a part 'train', but has {', '.join(parts)}."
        )
    test = [parts[name] for name in TEST_PARTS if name in parts]
    return {"": parts["train"]} | ({"_test": test[0]} if test else {})


def find_column(part: Any, kind: str) -> str:
    """Return the name of the first column of a type such as "Image"."""
    names = [name for name, feature in part.features.items() if type(feature).__name__ == kind]
    if not names:
        found = ", ".join(f"{name} ({type(f).__name__})" for name, f in part.features.items())
        raise ValueError(f"data set 'hf' needs a column of type {kind}, but there are: {found}.")
    return str(names[0])
