"""Share dropout masks between clients and one machine, so that gradients do not differ by chance.

Dropout draws its masks from a generator that is seeded for each client. On a merged batch one
machine would draw other masks. Within `share_masks` every random operation is made part by part:
the samples of a client get the numbers that this client's generator draws for them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fednorm.core.messages import Batches
from fednorm.core.task import isolated_rng


class UnmatchedDrawError(RuntimeError):
    """A random operation that does not draw for each sample independently."""


def share_masks(parts: Sequence[Batches], model: nn.Module) -> TorchDispatchMode:
    """Let `model`, on the merged first batches of `parts`, draw what each part draws alone.

    Raises UnmatchedDrawError, within the block, where random numbers do not belong to samples:
    their tensor must hold the samples in its first axis, each in as many rows as the others.
    """
    sizes = [len(next(iter(part.steps))[1]) for part in parts]
    return _PartByPart([_Stream(part.seed, model) for part in parts], sizes)


class _Stream:
    """The generators of one client, which continue from where they stopped."""

    def __init__(self, seed: int, model: nn.Module) -> None:
        device = next(model.parameters()).device
        self.model, self.devices = model, [] if device.type == "cpu" else [device]
        with isolated_rng(seed, model):
            self.states = self._read()

    def _read(self) -> list[Tensor]:
        others = [torch.get_device_module(d).get_rng_state(d) for d in self.devices]
        return [torch.get_rng_state(), *others]

    @contextmanager
    def resume(self) -> Iterator[None]:
        with isolated_rng(0, self.model):  # the seed is replaced by the state
            torch.set_rng_state(self.states[0])
            for device, state in zip(self.devices, self.states[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            yield
            self.states = self._read()


class _PartByPart(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Cuts the tensors of random operations into the parts of a merged batch."""

    def __init__(self, streams: Sequence[_Stream], sizes: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self.streams, self.sizes = streams, sizes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch imports its compiler at the first use: two seconds."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in op.tags or given.get("generator") is not None:
            return op(*args, **given)
        rows = self._rows(op, args)
        own: list[Any] = []
        found: list[Any] = []
        for number, stream in enumerate(self.streams):
            own = [arg.split(rows)[number] if _has(arg, sum(rows)) else arg for arg in args]
            with stream.resume():
                found.append(op(*own, **given))
        if found[-1] is own[0]:  # the parts were changed in place
            return args[0]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(same) for same in zip(*found, strict=True))
        return torch.cat(found)

    def _rows(self, op: Any, args: Sequence[Any]) -> list[int]:
        """Return how many rows of the first tensor belong to each part."""
        total = sum(self.sizes)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        length = 0 if first is None or not first.dim() else len(first)
        if not length or length % total:
            shape = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)}"
            raise UnmatchedDrawError(
                f"random numbers of a model must be drawn for each sample, but {op} draws for "
                f"{shape} in a batch of {total} samples."
            )
        return [size * (length // total) for size in self.sizes]


def _has(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
