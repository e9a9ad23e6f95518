"""A folder of images: `ROOT/CLASS/*.jpg`, or `ROOT/DOMAIN/CLASS/*.jpg`, one group per domain.

Classes are the names of folders, sorted. `ROOT` may instead hold `train` and `test` (or `val`),
each like this; if not, the same share of each class of each domain is held out for testing, chosen
by the seed. Pixels are always normalized with mean 0.5 and standard deviation 0.5.

Or a folder of arrays: `ROOT/CLIENT/` with `x.npy` and `y.npy`, perhaps `x_test.npy` and
`y_test.npy`; one `.npz` file with arrays of these names; or a `.csv` file with a header, of which
the column `target` is y and the others x. One group per folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.dataset import Dataset
from fednorm.data.decoder import Decoder, center_crop
from fednorm.data.given_data import name_clients, read_clients
from fednorm.data.image_dataset import check_share, hold_out
from fednorm.data.image_files import (
    ImageFileDataset,
    ImageFiles,
    SplitFiles,
    list_folders,
    list_images,
)
from fednorm.data.transforms import BatchTransform
from fednorm.errors import DamagedDataError, MissingDataError
from fednorm.names import unknown
from fednorm.registry import param

GRAY, COLOR = 1, 3


@dataclass(frozen=True, slots=True)
class ImageFolder(ImageFileDataset):
    """Your own images, one folder per class, or arrays, one per client; outer ones are groups."""

    name: ClassVar[str] = "folder"
    sources: ClassVar[tuple[str, ...]] = ("your images: root",)

    root: str = param(help="the folder")
    size: int | None = param(64, "height and width; none: all images have one size")
    channels: int = param(COLOR, "3 for colour, 1 for grey")
    test_share: float = param(0.2, "share held out for testing, if there is no folder for it")

    def __post_init__(self) -> None:
        ImageFileDataset.__post_init__(self)  # with slots, super() finds no class
        check_share(self.name, self.test_share)
        if self.channels not in (GRAY, COLOR):
            raise ValueError(f"data set 'folder' needs channels of 1 or 3, not {self.channels}.")

    def load(self, seed: int) -> Dataset:
        """Load arrays, one folder per client, if there are such files; else images."""
        clients = read_client_folders(Path(self.root).expanduser())
        if clients is None:
            return ImageFileDataset.load(self, seed)
        if self.train or self.test or self.augment:
            raise ValueError("data set 'folder' has train, test and augment for images alone.")
        return name_clients(read_clients([*clients.values()], self.name), list(clients)).load(seed)

    def list_files(self, seed: int) -> SplitFiles:
        """Return the images of both splits."""
        root = Path(self.root).expanduser().resolve()
        if not root.is_dir():
            raise MissingDataError(f"data set 'folder' needs a folder, but {root} is none.")
        test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
        if (root / "train").is_dir() and test is not None:
            names, train = scan_tree(root / "train")
            return SplitFiles(train, scan_tree(test, names)[1], len(names), root)
        names, files = scan_tree(root)
        # One number for each class of each domain.
        kinds = np.asarray(files.labels)
        if files.groups is not None:
            kinds = kinds + len(names) * np.unique(files.groups, return_inverse=True)[1]
        held = hold_out(kinds, self.test_share, make_rng(seed, Stream.FOLDER_SPLIT))
        train, tested = files.take(np.flatnonzero(~held)), files.take(np.flatnonzero(held))
        return SplitFiles(train, tested, len(names), root)

    def make_decoder(self) -> Decoder:
        """Resize and crop."""
        return center_crop(self.size, self.channels)

    def choose_transform(self, height: int, width: int) -> BatchTransform:
        """Normalize with mean and standard deviation 0.5."""
        half = (0.5,) * self.channels
        return self.make_transform(half, half, min(height, width))


def read_client_folders(root: Path) -> dict[str, Any] | None:
    """Return the arrays of each client's folder, or None if the first one holds none."""
    names = list_folders(root) if root.is_dir() else []
    if not names or not _list_array_files(root / names[0]):
        return None
    return {name: _read_arrays(root / name) for name in names}


def _list_array_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in {".npy", ".npz", ".csv"})


def _read_arrays(folder: Path) -> tuple[Any, ...]:
    """Return (x, y), or (x, y, x_test, y_test), of one client."""
    found = {path.name: path for path in _list_array_files(folder)}
    try:
        if "x.npy" in found:
            arrays = {Path(name).stem: np.load(path) for name, path in found.items()}
        elif len(found) == 1 and (only := next(iter(found.values()))).suffix == ".npz":
            arrays = dict(np.load(only))
        elif len(found) == 1:
            arrays = _read_csv(next(iter(found.values())))
        else:
            arrays = {}
    except (ValueError, EOFError, OSError) as error:
        raise DamagedDataError(f"data of client folder {folder} cannot be read: {error}") from error
    if not {"x", "y"} <= arrays.keys():
        raise MissingDataError(
            f"data set 'folder' needs x.npy and y.npy, one .npz file with x and y, or one .csv "
            f"file in every client's folder, but {folder} has {', '.join(found) or 'none'}."
        )
    tested = ("x_test", "y_test") if {"x_test", "y_test"} <= arrays.keys() else ()
    return tuple(arrays[name] for name in ("x", "y", *tested))


def _read_csv(path: Path) -> dict[str, Any]:
    """Return x and y of a file of numbers with a header; whole targets are classes."""
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8", ndmin=1)
    columns = table.dtype.names or ()
    if "target" not in columns:
        raise ValueError(f"{path.name} needs a column 'target', but has {', '.join(columns)}")
    inputs = [name for name in columns if name != "target"]
    x = np.stack([table[name].astype(np.float32) for name in inputs], 1)
    return {"x": x, "y": table["target"]}


def scan_tree(root: Path, classes: list[str] | None = None) -> tuple[list[str], ImageFiles]:
    """Return the classes and images below a folder; check them against `classes`."""
    outer = list_folders(root)
    flat = any(list_images(root / name) for name in outer)
    pairs = [(domain, name) for domain in outer for name in list_folders(root / domain)]
    folders = [("", name) for name in outer] if flat else pairs
    names = classes or sorted({name for _, name in folders})
    if strangers := [name for _, name in folders if name not in names]:
        raise unknown("class folder of the test images", strangers[0], names)
    found = [
        (path, names.index(name), domain)
        for domain, name in folders
        for path in list_images(root / domain / name)
    ]
    if not found:
        raise MissingDataError(
            f"data set 'folder' needs images in CLASS/ or DOMAIN/CLASS/, but {root} has none."
        )
    paths, labels, domains = zip(*found, strict=True)
    files = ImageFiles(list(paths), np.array(labels, np.int64), None if flat else np.array(domains))
    return names, files
