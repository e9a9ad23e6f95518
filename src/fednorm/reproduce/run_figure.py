"""Run a figure panel by panel into a folder; finished runs are not repeated."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fednorm.experiment.callbacks.base import Monitor
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.results import FigureResult, PanelResult
from fednorm.experiment.run_folder import name_folder
from fednorm.experiment.schema.config import Experiment
from fednorm.report.write import QUESTION
from fednorm.reproduce.figure import (
    Figure,
    PanelSpec,
    Scale,
    describe_cuts,
    find_figure,
    scale_figure,
)

Shown = Callable[[str, Experiment], AbstractContextManager[Monitor]]


@dataclass(frozen=True)
class FigureRequest:
    """Which figure is run, and how."""

    name: str
    scale: Scale
    settings: Sequence[str] = ()  # `key=value`, given by the user
    titles: Sequence[str] = ()  # of the panels; empty: those of the scale

    @property
    def experiments(self) -> list[tuple[PanelSpec, Experiment]]:
        """The experiment of every panel."""
        return scale_figure(find_figure(self.name), self.scale, self.settings, self.titles)


def reproduce(
    request: FigureRequest, folder: Path, *, shown: Shown, workers: int = 1
) -> Iterator[FigureResult]:
    """Run every panel of a figure; yield the result so far after each of them.

    `shown` opens a live view of one panel. An interrupted panel is the last one.
    """
    figure = find_figure(request.name)
    said = describe_cuts(figure, request.scale, request.settings, request.titles)
    panels: list[PanelResult] = []
    for spec, experiment in request.experiments:
        with shown(spec.title, experiment) as monitor:
            comparison = run_comparison(
                experiment,
                folder=folder / name_folder(spec.title),
                monitor=monitor,
                workers=workers,
            )
        # Two rounds on synthetic data cannot be compared with published numbers.
        synthetic = request.scale == "smoke"
        panels.append(
            PanelResult(
                spec.title,
                comparison,
                published={} if synthetic else spec.published,
                published_exchanges=spec.published_exchanges,
                published_std={} if synthetic else spec.published_std,
                best=figure.best,
            )
        )
        yield _make_result(request, figure, panels, said)
        if any(run.status == "interrupted" for run in comparison.runs):
            return


def _make_result(
    request: FigureRequest, figure: Figure, panels: Sequence[PanelResult], said: tuple[str, ...]
) -> FigureResult:
    settings = "".join(f" --set {shlex.quote(setting)}" for setting in request.settings)
    titles = "".join(f" --panel {shlex.quote(title)}" for title in request.titles)
    command = f"fednorm reproduce {request.name} --scale {request.scale}{titles}"
    own = not figure.source
    return FigureResult(
        title=figure.title,
        question=figure.question or QUESTION,
        command=f"fednorm run {request.name}{settings}" if own else f"{command}{settings}",
        panels=tuple(panels),
        source=figure.source,
        cuts=said,
        smoke=request.scale == "smoke",
        finals=figure.finals,
        heat=figure.heat,
        curves=None if figure.curves is None else tuple(figure.curves),
    )
