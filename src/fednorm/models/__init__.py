"""The networks of the papers, small ones, and your own as "package.module:function"."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fednorm.names import call_user_function
from fednorm.registry import Registry, is_config

if TYPE_CHECKING:
    from torch import nn

    from fednorm.models.base import ModelConfig

__all__ = ["MODELS", "create_model", "list_models"]

MODELS: "Registry[ModelConfig]" = Registry(
    "model",
    __name__,
    {
        "mlp": "small:Mlp",
        "cnn": "small:Cnn",
        "resnet": "resnet:ResNet",
        "tutorial_cnn": "small:TutorialCnn",
        "fbn_cnn": "small:FbnCnn",
        "lenet": "small:LeNet",
        "resnet20": "resnet:ResNet20",
        "resnet18": "resnet:ResNet18",
        "resnet50": "resnet:ResNet50",
        "mobilenet_v2": "deeplabv3plus:MobileNetV2",
        "deeplabv3plus": "deeplabv3plus:DeepLabV3Plus",
    },
    "fednorm.models.base:ModelConfig",
)


def create_model(
    name: str, shape: tuple[int, ...], classes: int, seed: int, **fields: Any
) -> "nn.Module":
    """Create the model `name`; its initial weights depend on `seed` alone.

    Args:
        name: a registered name, or "package.module:function" for your own model: it is
            called with `shape` and `classes` if it takes them; or a class: a network, or a
            frozen dataclass with a method `build`.
        shape: the shape of one sample, without the batch.
        classes: the number of classes.
        seed: the same seed gives the same weights; the global random state does not change.
        fields: further settings of the model, such as `hidden=(64,)`.

    >>> create_model("mlp", (2,), classes=3, seed=0, hidden=(4,))[-1]
    Linear(in_features=4, out_features=3, bias=True)
    """
    from fednorm.core.task import isolated_rng  # noqa: PLC0415 (models are listed without torch)

    with isolated_rng(seed):
        if MODELS.has_own(name) or is_config(MODELS, name, "build"):
            return MODELS.create(name, fields).build(tuple(shape), classes)
        return _call_user_model(name, {"shape": tuple(shape), "classes": classes}, fields)


def list_models() -> list[str]:
    """Return the names of all models, sorted.

    >>> list_models()[:3]
    ['cnn', 'deeplabv3plus', 'fbn_cnn']
    """
    return sorted(MODELS.list_names())


def _call_user_model(
    name: str, offered: Mapping[str, Any], fields: Mapping[str, Any]
) -> "nn.Module":
    """Call the user's function, with `offered` arguments if it takes them."""
    from torch import nn  # noqa: PLC0415 (as above)

    model = call_user_function("model", name, offered, fields)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {name!r} must return a torch.nn.Module, but returned "
            f"{type(model).__name__}; return the network itself."
        )
    return model
