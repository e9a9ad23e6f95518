"""Reproduce published tables and figures, each described by a TOML in `configs/`."""

from typing import TYPE_CHECKING

from fednorm.registry import export_lazily

if TYPE_CHECKING:
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

__getattr__ = export_lazily(
    __name__,
    {
        "fednorm.reproduce.figure": "Figure PanelSpec find_figure list_figures",
        "fednorm.reproduce.run_figure": "FigureRequest reproduce",
        "fednorm.reproduce.scale": "SCALES Scale scale_figure",
    },
)
