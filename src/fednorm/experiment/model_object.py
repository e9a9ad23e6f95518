"""A model given as an object: how it is made, and what a recorded config says of it."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from fednorm.core.task import isolated_rng
from fednorm.errors import ConfigError, ConversionError
from fednorm.nn.copies import copy_model, refuse_uncopyable

ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]
OBJECT = "object:"  # begins the name of a model that no configuration can make
_DIGITS = 12  # of a hash


def make_from_object(model: ModelSource, seed: int) -> nn.Module:
    """Return a copy of the user's module, or what the function makes, seeded as a named model."""
    if isinstance(model, nn.Module):
        return copy_model(model)  # `.to` changes a module in place
    with isolated_rng(seed):
        return model()


def describe_object(model: ModelSource) -> dict[str, str]:
    """Return what a recorded config says of a model object: its class, and hashes.

    `source` is that of its classes and function, `content` of its layers and initial weights.

    >>> describe_object(nn.Linear(1, 1))["name"]
    'object:torch.nn.modules.linear.Linear'
    """
    try:
        made = make_from_object(model, 0)
        refuse_uncopyable(made)
    except ConversionError as error:
        raise ConfigError(f"the model cannot be used: {error}") from error
    kind = type(made)
    return {
        "name": f"{OBJECT}{kind.__module__}.{kind.__qualname__}",
        "source": _hash(_list_sources(model, made)),
        "content": _hash(_list_content(made)),
    }


def _list_sources(model: ModelSource, made: nn.Module) -> Iterator[bytes]:
    kinds: list[Any] = sorted({type(m) for m in made.modules()}, key=lambda kind: kind.__qualname__)
    for source in (*kinds, *(() if isinstance(model, nn.Module) else (model,))):
        if not getattr(source, "__module__", "").startswith("torch."):
            try:
                yield inspect.getsource(source).encode()
            except (OSError, TypeError):  # typed into a session, or compiled
                yield getattr(source, "__qualname__", "").encode()


def _list_content(made: nn.Module) -> Iterator[bytes]:
    yield re.sub(r"0x[0-9a-f]+", "", repr(made)).encode()
    for key, tensor in made.state_dict().items():
        yield f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:_DIGITS]
