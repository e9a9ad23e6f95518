"""A published table or figure, run again: its panels, each with the published numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fednorm.experiment.result import Comparison


@dataclass(frozen=True)
class PanelResult:
    """One part of a figure, or one column of a table: strategies in one setting."""

    title: str  # such as "γ = 0"
    comparison: Comparison
    published: Mapping[str, float] = field(default_factory=dict)  # by label, in per cent
    published_exchanges: Mapping[str, float] = field(default_factory=dict)  # a round, by label
    published_std: Mapping[str, float] = field(default_factory=dict)  # of means, in points
    best: bool = False  # published numbers are the best of a run, not the final ones


@dataclass(frozen=True)
class FigureResult:
    """What a report page tells."""

    title: str  # such as "FBN, Figure 3a"
    question: str  # that the experiment answers
    command: str  # that repeats it
    panels: tuple[PanelResult, ...]
    source: str = ""  # the paper
    cuts: tuple[str, ...] = ()  # how the setting differs from the paper's, a sentence each
    finals: str = ""  # what the panels differ in, if final values are drawn against it
    curves: tuple[str, ...] | None = None  # titles of the panels whose curves are drawn; all
    heat: tuple[str, str] | None = None  # methods whose difference is drawn panel by panel

    @property
    def curve_panels(self) -> tuple[PanelResult, ...]:
        """The panels whose curves are drawn, in the order in which the paper shows them."""
        if self.curves is None:
            return self.panels
        by_title = {panel.title: panel for panel in self.panels}
        return tuple(by_title[title] for title in self.curves if title in by_title)
