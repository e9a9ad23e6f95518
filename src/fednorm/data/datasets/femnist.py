"""FEMNIST: handwritten digits and letters, 28x28 pixels, 62 classes; one client per writer.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018), arXiv:1812.01097. LEAF's own
scripts make the files: `root` holds `train/*.json` and `test/*.json`, or JSON files alone, of which
the same share of every writer's samples is held out for testing, chosen by the seed. Pixels are
always normalized with mean 0.5 and standard deviation 0.5.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.cache import Arrays, get_decoded_home, list_roots, load_or_create, make_key, save
from fednorm.data.dataset import Dataset
from fednorm.data.download import show_progress
from fednorm.data.image_dataset import ImageDataset, check_share, make_dataset, split
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.registry import param

CLASSES, SIDE = 62, 28


@dataclass(frozen=True, slots=True)
class Femnist(ImageDataset):
    """Handwritten digits and letters, 28x28 pixels; groups are writers. LEAF's files are needed."""

    name: ClassVar[str] = "femnist"
    sources: ClassVar[tuple[str, ...]] = ("your copy, made by LEAF: root",)

    test_share: float = param(0.2, "share of each writer held out, if there is no test part")

    def __post_init__(self) -> None:
        ImageDataset.__post_init__(self)  # with slots, super() finds no class
        check_share(self.name, self.test_share)

    def load(self, seed: int) -> Dataset:
        """Load the samples of all writers."""
        files = self._find_files()
        facts = [
            (end, str(path), path.stat().st_size, path.stat().st_mtime_ns)
            for end, paths in files.items()
            for path in paths
        ]
        arrays = load_or_create(
            get_decoded_home() / self.name / make_key(facts), lambda folder: _write(folder, files)
        )
        if "x_test" not in arrays:
            rng = make_rng(seed, Stream.FEMNIST_SPLIT)
            arrays = split(arrays, arrays["groups"], self.test_share, rng)
        transform = self.make_transform((0.5,), (0.5,), SIDE)
        return make_dataset(self.name, self.subsample(arrays, seed), CLASSES, transform)

    def _find_files(self) -> dict[str, list[Path]]:
        """Return the files of each split: "" for training (or all) and "_test"."""
        looked = [r / below for r in list_roots(self.root) for below in ("", self.name, "data")]
        for folder in looked:
            parts = {"": folder / "train", "_test": folder / "test"}
            files = {end: sorted(path.glob("*.json")) for end, path in parts.items()}
            if all(files.values()):
                return files
            ours = self.root is not None or folder.name == self.name  # not just any JSON
            if ours and (alone := sorted(folder.glob("*.json"))):
                return {"": alone}
        raise MissingDataError(
            f"data set {self.name!r} needs LEAF's files train/*.json and test/*.json, or *.json "
            f"alone, but there are none at {', '.join(map(str, looked))}; make them with LEAF's "
            f"data/femnist/preprocess.sh and set the data set's root to their folder."
        )


def _write(folder: Path, files: dict[str, list[Path]]) -> None:
    with show_progress("decoding femnist", sum(map(len, files.values()))) as advance:
        for end, paths in files.items():
            parts = []
            for path in paths:
                parts.append(read_leaf_file(path))
                advance(1)
            joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            save(folder, {f"{key}{end}": array for key, array in joined.items()})


def read_leaf_file(path: Path) -> Arrays:
    """Read the samples of one of LEAF's files, writer by writer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        own = [(user, content["user_data"][user]) for user in content["users"]]
        pixels = np.concatenate([np.asarray(data["x"], np.float64) for _, data in own])
        return {
            "x": np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE),
            "y": np.concatenate([np.asarray(data["y"], np.int64) for _, data in own]),
            "groups": np.repeat([user for user, _ in own], [len(data["y"]) for _, data in own]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(
            f"{path} is not a file of LEAF's FEMNIST, which has users and their x (784 numbers "
            f"each) and y: {error!r}; make it again, or point root elsewhere."
        ) from error
