"""The networks of the papers, small ones, and your own as "package.module:function"."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fednorm.core.task import isolated_rng
from fednorm.models.base import ModelConfig
from fednorm.models.deeplabv3plus import DeepLabV3Plus
from fednorm.models.fbn_cnn import FbnCnn
from fednorm.models.lenet import LeNet
from fednorm.models.mobilenet_v2 import MobileNetV2
from fednorm.models.resnet import ResNet, ResNet18, ResNet20, ResNet50
from fednorm.models.small import Cnn, Mlp, TutorialCnn
from fednorm.registry import call_user_function, create

__all__ = ["MODELS", "ModelConfig", "create_model", "list_models"]

MODELS: dict[str, type[ModelConfig]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "resnet": ResNet,
    "tutorial_cnn": TutorialCnn,
    "fbn_cnn": FbnCnn,
    "lenet": LeNet,
    "resnet20": ResNet20,
    "resnet18": ResNet18,
    "resnet50": ResNet50,
    "mobilenet_v2": MobileNetV2,
    "deeplabv3plus": DeepLabV3Plus,
}


def create_model(
    name: str, shape: tuple[int, ...], classes: int, seed: int, **fields: Any
) -> nn.Module:
    """Create the model `name`; its initial weights depend on `seed` alone.

    Args:
        name: a registered name, or "package.module:function" for your own model: it is
            called with `shape` and `classes` if it takes them.
        shape: the shape of one sample, without the batch.
        classes: the number of classes.
        seed: the same seed gives the same weights; the global random state does not change.
        fields: further settings of the model, such as `hidden=(64,)`.

    >>> import torch
    >>> create_model("mlp", (2,), classes=3, seed=0, hidden=(4,))(torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """
    with isolated_rng(seed):
        if ":" in name:
            return _call_user_model(name, {"shape": tuple(shape), "classes": classes}, fields)
        return create("model", MODELS, name, fields).build(tuple(shape), classes)


def list_models() -> list[str]:
    """Return the names of all models, sorted.

    >>> list_models()[:3]
    ['cnn', 'deeplabv3plus', 'fbn_cnn']
    """
    return sorted(MODELS)


def _call_user_model(name: str, offered: Mapping[str, Any], fields: Mapping[str, Any]) -> nn.Module:
    """Call the user's function, with `offered` arguments if it takes them."""
    model = call_user_function("model", name, offered, fields)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {name!r} must return a torch.nn.Module, but returned "
            f"{type(model).__name__}; return the network itself."
        )
    return model
