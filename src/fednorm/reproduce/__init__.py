"""Reproduce published tables and figures, each described by a TOML in `configs/`."""

from fednorm.reproduce.figure import Figure, PanelSpec, find_figure, list_figures
from fednorm.reproduce.run_figure import FigureRequest, reproduce
from fednorm.reproduce.scale import SCALES, Scale, scale_figure

__all__ = [
    "SCALES",
    "Figure",
    "FigureRequest",
    "PanelSpec",
    "Scale",
    "find_figure",
    "list_figures",
    "reproduce",
    "scale_figure",
]
