"""Data sets, and their division among clients (`fednorm.data.partition`)."""

from collections.abc import Mapping
from typing import Any

from fednorm.data.dataset import Dataset, DatasetConfig
from fednorm.data.datasets.cifar import Cifar10, Cifar100
from fednorm.data.datasets.cityscapes import Cityscapes
from fednorm.data.datasets.digits import Digits
from fednorm.data.datasets.femnist import Femnist
from fednorm.data.datasets.folder import ImageFolder
from fednorm.data.datasets.huggingface import HuggingFace
from fednorm.data.datasets.imagenet import ImageNet
from fednorm.data.datasets.mnist import FashionMnist, Mnist
from fednorm.data.datasets.synthetic import Patterns, Ring, Scenes
from fednorm.data.datasets.tiny_imagenet import TinyImageNet
from fednorm.registry import call_user_function, create

__all__ = ["DATASETS", "Dataset", "DatasetConfig", "list_datasets", "load_dataset"]

DATASETS: dict[str, type[DatasetConfig]] = {
    "digits": Digits,
    "ring": Ring,
    "patterns": Patterns,
    "scenes": Scenes,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "femnist": Femnist,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "tiny_imagenet": TinyImageNet,
    "imagenet": ImageNet,
    "cityscapes": Cityscapes,
    "folder": ImageFolder,
    "hf": HuggingFace,
}


def load_dataset(name: str, seed: int, **fields: Any) -> Dataset:
    """Load the data set `name`; download it if this machine has no copy.

    Args:
        name: a registered name, or "package.module:function" for your own data set: it is
            called with `seed` if it takes one, and returns a `Dataset`.
        seed: the same seed gives the same data everywhere.
        fields: further settings of the data set, such as `test=300`.

    >>> load_dataset("ring", seed=0, classes=3).classes
    3
    """
    if ":" in name:
        return _call_user_dataset(name, seed, fields)
    return create("data set", DATASETS, name, fields).load(seed)


def list_datasets() -> list[str]:
    """Return the names of all data sets, sorted.

    >>> list_datasets()[:3]
    ['cifar10', 'cifar100', 'cityscapes']
    """
    return sorted(DATASETS)


def _call_user_dataset(name: str, seed: int, fields: Mapping[str, Any]) -> Dataset:
    """Call the user's function, with `seed` if it takes one."""
    data = call_user_function("data set", name, {"seed": seed}, fields)
    if not isinstance(data, Dataset):
        raise TypeError(
            f"data set {name!r} must return a fednorm.data.Dataset, but returned "
            f"{type(data).__name__}; build one from its tensors."
        )
    return data
