"""Published tables and figures, run again: one TOML each, in `configs/`."""

from fednorm.reproduce.figure import Figure, PanelSpec, figures, find_figure
from fednorm.reproduce.run import Order, reproduce
from fednorm.reproduce.scale import SCALES, Scale, scaled

__all__ = [
    "SCALES",
    "Figure",
    "Order",
    "PanelSpec",
    "Scale",
    "figures",
    "find_figure",
    "reproduce",
    "scaled",
]
