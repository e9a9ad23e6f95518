"""Tensors as Flower's arrays, and back; nothing that arrives can run code.

An array is what `numpy.save` writes, and is read with `allow_pickle=False`. Integers stay integers.
"""

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fednorm.core.types import Tensors
from fednorm.errors import WireError

_NUMPY = "numpy.ndarray"


def to_array_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as a record of Flower's arrays."""
    return ArrayRecord({name: _array(name, tensor) for name, tensor in tensors.items()})


def _array(name: str, tensor: Tensor) -> Array:
    try:
        # Without contiguity a transposed weight would travel, and come back, in another order.
        return Array(tensor.detach().cpu().contiguous().numpy())
    except TypeError as error:
        raise WireError(
            f"tensor {name!r} has the type {tensor.dtype}, which numpy does not know and Flower "
            "cannot send; keep the model in float32."
        ) from error


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record; only plain numbers in numpy's own format are read."""
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    if array.stype != _NUMPY:
        raise WireError(f"array {name!r} must be of type {_NUMPY!r}, but is {array.stype!r}.")
    try:
        return torch.from_numpy(array.numpy())
    except (ValueError, TypeError, EOFError, MemoryError, SyntaxError) as error:
        raise WireError(f"array {name!r} cannot be read as numbers: {error}") from error


def expect(what: str, found: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Return `found` with the devices and layouts of `like`, or raise WireError."""
    if unknown := sorted(found.keys() - like.keys()):
        raise WireError(f"{what} has {unknown[0]!r}, which the model does not have.")
    if missing := sorted(like.keys() - found.keys()):
        raise WireError(f"{what} lacks {missing[0]!r}.")
    return {name: match_tensors(f"{what} {name!r}", found[name], like[name]) for name in like}


def match_tensors(what: str, found: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the device and layout of `like`, or raise WireError."""
    if found.shape != like.shape or found.dtype != like.dtype:
        raise WireError(
            f"{what} must be {like.dtype} of shape {tuple(like.shape)}, "
            f"but is {found.dtype} of shape {tuple(found.shape)}."
        )
    # The same device and the same order in memory, so that sums are taken in the same order.
    return torch.empty_like(like).copy_(found)
