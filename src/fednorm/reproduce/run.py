"""Runs a figure panel by panel into a folder; what is there already is not run again."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fednorm.experiment.compare import run_all
from fednorm.experiment.config import Experiment
from fednorm.experiment.run import OnRound
from fednorm.experiment.story import Panel, Story
from fednorm.reproduce.figure import find_figure
from fednorm.reproduce.scale import Scale, cuts, scaled

Shown = Callable[[str, Experiment], AbstractContextManager[OnRound]]


def reproduce(
    name: str, scale: Scale, folder: Path, *, shown: Shown, workers: int | None = None
) -> Story:
    """Run every panel of a figure; `shown` opens a live view of one panel.

    An interrupted panel is the last one; the story then holds what was done.
    """
    figure = find_figure(name)
    panels: list[Panel] = []
    for spec, experiment in scaled(figure, scale):
        with shown(spec.title, experiment) as on_round:
            comparison = run_all(
                experiment,
                folder=folder / panel_folder(spec.title),
                on_round=on_round,
                workers=workers or 1,
            )
        panels.append(Panel(spec.title, comparison, spec.published, spec.published_exchanges))
        if any(run.status == "interrupted" for run in comparison.runs):
            break
    return Story(
        title=figure.title,
        question=figure.question,
        command=f"fednorm reproduce {name} --scale {scale}",
        panels=tuple(panels),
        source=figure.source,
        cuts=cuts(figure, scale),
        finals=figure.finals,
        curves=None if figure.curves is None else tuple(figure.curves),
    )


def panel_folder(title: str) -> str:
    """Return what a panel is called on disk.

    >>> panel_folder("(d) E = 100")
    'd_E_=_100'
    """
    return re.sub(r"[^\w.=-]+", "_", title).strip("_")
