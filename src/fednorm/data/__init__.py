"""Data sets, and their division among clients (`fednorm.data.partition`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fednorm.names import call_user_function
from fednorm.objects import OBJECT, find_object
from fednorm.registry import Registry, export_lazily, is_config

if TYPE_CHECKING:
    from fednorm.data.dataset import Dataset, DatasetConfig
    from fednorm.data.given_data import GivenData

__all__ = ["DATASETS", "Dataset", "list_datasets", "load_dataset"]

DATASETS: "Registry[DatasetConfig]" = Registry(
    "data set",
    f"{__name__}.datasets",
    {
        "digits": "built_in:Digits",
        "ring": "built_in:Ring",
        "patterns": "built_in:Patterns",
        "scenes": "built_in:Scenes",
        "mnist": "mnist:Mnist",
        "fashion_mnist": "mnist:FashionMnist",
        "femnist": "mnist:Femnist",
        "cifar10": "cifar:Cifar10",
        "cifar100": "cifar:Cifar100",
        "tiny_imagenet": "imagenet:TinyImageNet",
        "imagenet": "imagenet:ImageNet",
        "cityscapes": "cityscapes:Cityscapes",
        "folder": "folder:ImageFolder",
        "hf": "huggingface:HuggingFace",
    },
    "fednorm.data.dataset:DatasetConfig",
)

__getattr__ = export_lazily(__name__, {"fednorm.data.dataset": "Dataset"})


def load_dataset(name: str, seed: int, **fields: Any) -> "Dataset":
    """Load the data set `name`; download it if this machine has no copy.

    Args:
        name: a registered name, or "package.module:function" for your own data set: it is
            called with `seed` if it takes one, and returns a `Dataset`, or data in any of the forms
            that `fednorm.compare` takes as `data=…`.
        seed: the same seed gives the same data everywhere.
        fields: further settings of the data set, such as `test=300`.

    >>> load_dataset("ring", seed=0, classes=3).classes
    3
    """
    if name.startswith(OBJECT):
        held = find_object("data set", name, str(fields.get("content")))
        return _load_given(held, seed)
    if DATASETS.has_own(name) or is_config(DATASETS, name, "load"):
        return DATASETS.create(name, fields).load(seed)
    return _call_user_dataset(name, seed, fields)


def list_datasets() -> list[str]:
    """Return the names of all data sets, sorted.

    >>> list_datasets()[:3]
    ['cifar10', 'cifar100', 'cityscapes']
    """
    return sorted(DATASETS.list_names())


def _call_user_dataset(name: str, seed: int, fields: Mapping[str, Any]) -> "Dataset":
    """Call the user's function, with `seed` if it takes one."""
    from fednorm.data.given_data import read_data  # noqa: PLC0415 (names are listed without torch)

    made = call_user_function("data set", name, {"seed": seed}, fields)
    return _load_given(read_data(made, name), seed)


def _load_given(data: "GivenData | Dataset", seed: int) -> "Dataset":
    from fednorm.data.given_data import GivenData  # noqa: PLC0415 (as above)

    return data.load(seed) if isinstance(data, GivenData) else data
