"""The seeds of one strategy as one curve."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fednorm.experiment.result import RunResult
from fednorm.report.numbers import finite


@dataclass(frozen=True)
class Curve:
    """A value, such as accuracy in per cent, for every round that at least one seed has."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def curve(runs: Sequence[RunResult]) -> Curve:
    """Return mean, minimum and maximum over the runs, leaving out what is not finite."""
    found = ((e.round, finite(e.accuracy)) for run in runs for e in run.history)
    return summarise((number, 100 * accuracy) for number, accuracy in found if accuracy is not None)


def summarise(points: Iterable[tuple[int, float]]) -> Curve:
    """Return mean, minimum and maximum of the values of each round."""
    values: dict[int, list[float]] = {}
    for number, value in points:
        values.setdefault(number, []).append(value)
    rounds = tuple(sorted(values))
    return Curve(
        rounds=rounds,
        mean=tuple(fmean(values[number]) for number in rounds),
        low=tuple(min(values[number]) for number in rounds),
        high=tuple(max(values[number]) for number in rounds),
    )


def breaks(runs: Sequence[RunResult]) -> list[tuple[int, float]]:
    """Return round and accuracy in per cent where diverged runs were last evaluated."""
    finals = (run.final for run in runs if run.status == "diverged")
    return [(f.round, 100 * f.accuracy) for f in finals if f and finite(f.accuracy) is not None]
