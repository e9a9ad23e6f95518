"""Layers that normalise, drop and activate in one, as timm's BatchNormAct2d does."""

from torch import Tensor, nn

from fednorm.nn.blend import blend


class Activated(nn.Module):
    """A forward pass that ends in `drop` and `act`; blended with the class of another layer."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return what the other layer returns, dropped and activated."""
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def activate(layer: nn.Module, drop: nn.Module, act: nn.Module) -> None:
    """Let a layer end in `drop` and `act`, under the keys that they have in timm's layer."""
    layer.__class__ = blend(Activated, type(layer), f"{type(layer).__name__}Act")
    layer.drop, layer.act = drop, act
