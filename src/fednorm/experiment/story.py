"""A published table or figure, run again: its panels, each with the published numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fednorm.experiment.result import Comparison


@dataclass(frozen=True)
class Panel:
    """One part of a figure, or one column of a table: strategies in one setting."""

    title: str  # such as "γ = 0"
    comparison: Comparison
    published: Mapping[str, float] = field(default_factory=dict)  # by label, in per cent
    expected_rounds: int | None = None  # of the paper, where `comparison` has fewer


@dataclass(frozen=True)
class Story:
    """What a report page tells."""

    title: str  # such as "FBN, Figure 3a"
    question: str  # that the experiment answers
    command: str  # that repeats it
    panels: tuple[Panel, ...]
    source: str = ""  # the paper
    cuts: tuple[str, ...] = ()  # how the setting differs from the paper's, a sentence each
