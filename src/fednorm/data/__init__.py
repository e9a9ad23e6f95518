"""Data sets, and how they are divided among clients (`fednorm.data.partition`)."""

from typing import Any

from fednorm.core.registry import create
from fednorm.data.cifar10 import Cifar10
from fednorm.data.cifar100 import Cifar100
from fednorm.data.cityscapes import Cityscapes
from fednorm.data.dataset import Dataset, Source
from fednorm.data.digits import Digits
from fednorm.data.fashion_mnist import FashionMnist
from fednorm.data.femnist import Femnist
from fednorm.data.folder import Folder
from fednorm.data.hf import HuggingFace
from fednorm.data.imagenet import ImageNet
from fednorm.data.mnist import Mnist
from fednorm.data.own import load_own
from fednorm.data.patterns import Patterns
from fednorm.data.ring import Ring
from fednorm.data.scenes import Scenes
from fednorm.data.tiny_imagenet import TinyImageNet

__all__ = ["DATASETS", "Dataset", "Source", "load"]

DATASETS: dict[str, type[Source]] = {
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
    "folder": Folder,
    "hf": HuggingFace,
}


def load(name: str, seed: int, **fields: Any) -> Dataset:
    """Return the data set `name`, drawn or split with the seed; it is fetched if it is missing.

    Args:
        name: a registered name, or "package.module:function" for a data set of your own, which is
            called with `seed` if it takes it and returns a `Dataset`.
        seed: the same seed gives the same data everywhere.
        fields: further settings of the data set, such as `test=300`.

    >>> load("ring", seed=0, classes=3).classes
    3
    """
    if ":" in name:
        return load_own(name, seed, fields)
    return create("data set", DATASETS, name, fields).load(seed)
