"""What a forward pass does, found by running it.

`calls_super_once` and `ends_in_activation` call a user's BatchNorm layer on a sample: a copy of it
without hooks, so nothing that belongs to the user changes. `note_single_values` watches the
BatchNorm layers of a model while the model runs.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fednorm.core.task import isolated_rng
from fednorm.nn.copies import drop_hooks

_BATCH, _SIDE = 4, 3  # of the sample
_DIMENSIONS: dict[type[_BatchNorm], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}
_ANY = (4, 2, 3, 5)


class _Witness(_BatchNorm):
    """Replaces torch's forward pass and counts its calls."""

    asked = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        self.asked += 1
        return input.clone()


class _Tail(nn.Module):
    """Probe activation: the composition of two reveals their order."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


def calls_super_once(layer: nn.Module, plain: type[_BatchNorm]) -> bool:
    """Return whether a layer's forward pass asks super() once, and leaves the statistics to it."""
    probe = _copy_bare(layer)
    try:
        probe.__class__ = type("Probe", (type(layer), _Witness, plain), {})
    except TypeError:  # classes that cannot be derived from, or not together with others
        return False
    return any(_asks_once(cast("_Witness", probe), x) for x in _make_samples(layer, plain))


def _asks_once(probe: _Witness, x: Tensor) -> bool:
    before = {key: value.clone() for key, value in probe.state_dict().items()}
    for mode in (True, False):
        probe.train(mode)
        probe.asked = 0
        if _call(probe, x) is None or probe.asked != 1:
            return False
    return all(torch.equal(value, before[key]) for key, value in probe.state_dict().items())


def ends_in_activation(layer: nn.Module, plain: type[_BatchNorm]) -> bool:
    """Return whether a layer is BatchNorm, then its child `drop`, then its child `act`."""
    if {name for name, _ in layer.named_children()} != {"drop", "act"}:
        return False
    probe = _copy_bare(layer)
    probe.drop, probe.act = _Tail(0.5), _Tail(-0.25)
    reference = copy.deepcopy(probe)
    reference.__class__ = plain
    (x,) = list(_make_samples(layer, plain))[:1]
    # In training, SyncBatchNorm would wait for other processes.
    for mode in (False,) if issubclass(plain, nn.SyncBatchNorm) else (True, False):
        given, expected = _call(probe.train(mode), x), _call(reference.train(mode), x)
        if given is None or expected is None or given.shape != x.shape:
            return False
        if not torch.allclose(given, probe.act(probe.drop(expected))):
            return False
    return True


def _copy_bare(layer: nn.Module) -> nn.Module:
    probe = copy.deepcopy(layer).float()
    drop_hooks(probe)
    for buffer in probe.buffers():
        buffer.add_(1)  # means start at 0, where scaling them would not show
    return probe


def _make_samples(layer: nn.Module, plain: type[_BatchNorm]) -> Iterator[Tensor]:
    """Yield a sample of each number of dimensions that a layer may take."""
    tensor = next(iter([*layer.parameters(), *layer.buffers()]), torch.empty(0))
    channels = cast("_BatchNorm", layer).num_features
    for dimensions in _DIMENSIONS.get(plain, _ANY):
        shape = (_BATCH, channels, *[_SIDE] * (dimensions - 2))
        size = math.prod(shape)
        yield torch.linspace(-2, 3, size, device=tensor.device).reshape(shape)


def _call(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a layer, or None if it fails or is no tensor."""
    try:
        with torch.no_grad(), isolated_rng(None, x.device):
            output = layer(x.clone())
    except Exception:  # noqa: BLE001 (a user's forward pass may fail in any way)
        return None
    return output if isinstance(output, Tensor) else None


@contextmanager
def note_single_values(model: nn.Module) -> Iterator[list[str]]:
    """Note the BatchNorm layers that are given one value per channel while they train.

    >>> model = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    >>> with note_single_values(model) as noted:
    ...     _ = model(torch.ones(1, 3, 2))
    >>> noted
    []
    """
    noted: list[str] = []

    def note(path: str, layer: nn.Module, x: Tensor) -> None:
        if layer.training and x.numel() == x.shape[1]:
            noted.append(path)

    def watch(path: str, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_pre_hook(lambda layer, given: note(path, layer, given[0]))

    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    handles = [watch(path, layer) for path, layer in layers]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()
