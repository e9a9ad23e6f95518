"""Values made of many tensors, as one block of shared memory and a plan of where they are."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64  # bytes; a tensor begins where any number format may


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a block."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedBlock:
    """Memory that another process sees too; it grows when it must."""

    def __init__(self) -> None:
        self.bytes = _allocate_shared(0)

    def write(self, value: Any) -> tuple[Any, Tensor | None]:
        """Write all tensors of a value; return its plan, and the block if it is a new one."""
        found: list[Tensor] = []
        places: list[TensorPlace] = []

        def placed(tensor: Tensor) -> TensorPlace:
            end = places[-1].start + _size(found[-1]) if places else 0
            start = -(-end // _ALIGNED) * _ALIGNED
            found.append(tensor.detach())
            places.append(TensorPlace(start, tuple(tensor.shape), tensor.dtype))
            return places[-1]

        plan = _map_values(value, Tensor, placed)
        needed = places[-1].start + _size(found[-1]) if places else 0
        new = needed > len(self.bytes)
        if new:
            self.bytes = _allocate_shared(2 * needed)
        for tensor, place in zip(found, places, strict=True):
            _view(self.bytes, place).copy_(tensor)
        return plan, self.bytes if new else None


def read_plan(plan: Any, block: Tensor, *, copy: bool) -> Any:
    """Return the value of a plan; without a copy it lives as long as nobody writes."""

    def found(place: TensorPlace) -> Tensor:
        view = _view(block, place)
        return view.clone() if copy else view

    return _map_values(plan, TensorPlace, found)


def _allocate_shared(count: int) -> Tensor:
    client_state: Tensor = torch.empty(count, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return client_state


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(block: Tensor, place: TensorPlace) -> Tensor:
    count = 1
    for length in place.shape:
        count *= length
    end = place.start + count * place.dtype.itemsize
    return block[place.start : end].view(place.dtype).view(place.shape)


def _map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the value with everything of one kind changed, however deep it lies."""
    if isinstance(value, kind):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: _map_values(getattr(value, field.name), kind, change)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: _map_values(item, kind, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map_values(item, kind, change) for item in value)
    return value
