"""Compare published with measured numbers: the gap of every method, and their order."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

from fednorm.experiment.results import PanelResult, Summary
from fednorm.report.format import keep_finite
from fednorm.report.outcome.ranking import estimate_noise, has_diverged

Order: TypeAlias = Literal["same", "swapped", "too close to call"]

CLOSE = 0.5  # points; published numbers that are no further apart have no order
RULE = (
    f"Two methods are too close to call if they were published within {CLOSE} points of each other "
    "or within one published standard deviation, or measured within one standard deviation over "
    "seeds, or within the standard error that the number of test samples leaves."
)
_LISTED = 4  # pairs in a sentence; the others are counted
_DIGITS = 9  # 80.4 − 79.9 is 0.5, not 0.5000000000000142


@dataclass(frozen=True)
class Row:
    """One method; all numbers in per cent, None where missing."""

    label: str
    published: float | None
    published_std: float | None
    measured: float | None  # mean over seeds
    spread: float  # standard deviation over seeds
    seeds: int  # with at least one evaluation

    @property
    def gap(self) -> float | None:
        """Measured minus published, in points."""
        if self.published is None or self.measured is None:
            return None
        return round(self.measured - self.published, _DIGITS)


@dataclass(frozen=True)
class Pair:
    """Two methods, `above` the one with the higher published number."""

    above: str
    below: str
    order: Order


@dataclass(frozen=True)
class Agreement:
    """How the measurements of a panel compare with the published numbers."""

    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]

    def select(self, order: Order) -> list[Pair]:
        """Return the pairs with that order."""
        return [pair for pair in self.pairs if pair.order == order]

    def describe(self) -> str:
        """Say whether the methods are ordered as published."""
        swapped, close = self.select("swapped"), self.select("too close to call")
        if not self.pairs:
            return "Fewer than two methods have both numbers, so there is no order to compare."
        if len(close) == len(self.pairs):
            return f"Too close to call: {_list_pairs(close, ' and ')}."
        same = len(self.select("same"))
        first = "Same order of methods as published."
        if close and not swapped:
            first = f"{same} of {len(self.pairs)} pairs of methods in the published order."
        if swapped:
            turned = [Pair(pair.below, pair.above, pair.order) for pair in swapped]
            first = f"Not the published order: {_list_pairs(turned, ' is above ')}."
        return first + (f" Too close to call: {_list_pairs(close, ' and ')}." if close else "")

    def to_json(self) -> dict[str, Any]:
        """Return the entry of results.json."""
        return {
            "statement": self.describe(),
            "rows": [{**asdict(row), "gap": row.gap} for row in self.rows],
            "pairs": [asdict(pair) for pair in self.pairs],
        }


def compare_published(panel: PanelResult) -> Agreement | None:
    """Compare a panel with its published numbers, or return None if it has none."""
    if not panel.published:
        return None
    summaries = panel.comparison.summaries()
    rows = [_make_row(summary, panel) for summary in summaries]
    run = {row.label for row in rows}
    rows += [
        Row(label, *_find_published(panel, label), measured=None, spread=0.0, seeds=0)
        for label in panel.published
        if label not in run
    ]
    both = [row for row in rows if row.gap is not None]
    ranked = combinations(sorted(both, key=lambda row: -(row.published or 0.0)), 2)
    pairs = (
        Pair(above.label, below.label, _compare_order(above, below)) for above, below in ranked
    )
    return Agreement(tuple(rows), tuple(pairs))


def _find_published(panel: PanelResult, label: str) -> tuple[float | None, float | None]:
    """Return the published mean and standard deviation; both None without a mean."""
    mean = keep_finite(panel.published.get(label))
    return mean, None if mean is None else keep_finite(panel.published_std.get(label))


def _make_row(summary: Summary, panel: PanelResult) -> Row:
    seeds = sum(bool(run.history) for run in summary.runs)
    mean = (
        None
        if has_diverged(summary)
        else keep_finite(summary.best if panel.best else summary.accuracy)
    )
    return Row(
        summary.strategy,
        *_find_published(panel, summary.strategy),
        measured=None if mean is None else 100 * mean,
        spread=100 * estimate_noise(summary, best=panel.best),
        seeds=seeds,
    )


def _compare_order(above: Row, below: Row) -> Order:
    published = round((above.published or 0.0) - (below.published or 0.0), _DIGITS)
    measured = round((above.measured or 0.0) - (below.measured or 0.0), _DIGITS)
    spread = round(max(above.spread, below.spread), _DIGITS)
    close = max(CLOSE, above.published_std or 0.0, below.published_std or 0.0)
    if published <= close or abs(measured) <= spread:
        return "too close to call"
    return "same" if measured > 0 else "swapped"


def _list_pairs(pairs: Sequence[Pair], between: str) -> str:
    phrases = [f"{pair.above}{between}{pair.below}" for pair in pairs[:_LISTED]]
    more = len(pairs) - len(phrases)
    if more:
        phrases.append(f"{more} more pair{'' if more == 1 else 's'}")
    return "; ".join(phrases)
