"""Data sets, and their division among clients (`fednorm.data.partition`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fednorm.registry import Registry, call_user_function, export_lazily

if TYPE_CHECKING:
    from fednorm.data.dataset import Dataset, DatasetConfig

__all__ = ["DATASETS", "Dataset", "DatasetConfig", "list_datasets", "load_dataset"]

DATASETS: "Registry[DatasetConfig]" = Registry(
    "data set",
    f"{__name__}.datasets",
    {
        "digits": "digits:Digits",
        "ring": "synthetic:Ring",
        "patterns": "synthetic:Patterns",
        "scenes": "synthetic:Scenes",
        "mnist": "mnist:Mnist",
        "fashion_mnist": "mnist:FashionMnist",
        "femnist": "femnist:Femnist",
        "cifar10": "cifar:Cifar10",
        "cifar100": "cifar:Cifar100",
        "tiny_imagenet": "imagenet:TinyImageNet",
        "imagenet": "imagenet:ImageNet",
        "cityscapes": "cityscapes:Cityscapes",
        "folder": "folder:ImageFolder",
        "hf": "huggingface:HuggingFace",
    },
)

__getattr__ = export_lazily(__name__, {"fednorm.data.dataset": "Dataset DatasetConfig"})


def load_dataset(name: str, seed: int, **fields: Any) -> "Dataset":
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
    return DATASETS.create(name, fields).load(seed)


def list_datasets() -> list[str]:
    """Return the names of all data sets, sorted.

    >>> list_datasets()[:3]
    ['cifar10', 'cifar100', 'cityscapes']
    """
    return sorted(DATASETS)


def _call_user_dataset(name: str, seed: int, fields: Mapping[str, Any]) -> "Dataset":
    """Call the user's function, with `seed` if it takes one."""
    from fednorm.data.dataset import Dataset  # noqa: PLC0415 (names are listed without torch)

    data = call_user_function("data set", name, {"seed": seed}, fields)
    if not isinstance(data, Dataset):
        raise TypeError(
            f"data set {name!r} must return a fednorm.data.Dataset, but returned "
            f"{type(data).__name__}; build one from its tensors."
        )
    return data
