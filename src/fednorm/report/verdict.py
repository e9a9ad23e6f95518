"""The verdict on a comparison, and its agreement with published numbers.

Of published and measured numbers it tells the gap of every method, and whether their order is the
same.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

from fednorm.experiment.results import Comparison, PanelResult, RunResult, Summary
from fednorm.experiment.summary.result_table import format_mean, format_percent, keep_finite
from fednorm.report.format import format_count, list_names
from fednorm.report.ranking import (
    Ranking,
    estimate_noise,
    has_diverged,
    is_personal,
    is_reference,
    measure_lead,
    rank,
)

Order: TypeAlias = Literal["same", "swapped", "too close to call"]

CLOSE = 0.5  # points; published numbers that are no further apart have no order
RULE = (
    f"Two methods are too close to call if they were published within {CLOSE} points of each other "
    "or within one published standard deviation, or measured within one sample standard "
    "deviation over seeds, or within the standard error that the number of test samples leaves."
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
    spread: float  # sample standard deviation over seeds
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
        phrases.append(format_count(more, "more pair"))
    return "; ".join(phrases)


def state_verdict(comparison: Comparison) -> str:
    """Say which federated strategy ends highest and lowest, and how far from `centralized`."""
    summaries = comparison.summaries()
    if not summaries:
        return "Nothing was run."
    ranking = rank(comparison)
    run = [s for s in summaries if not is_reference(comparison, s)]
    shared = [s for s in run if not is_personal(s)]
    if shared or not run:
        sentences = [_name_winner(ranking.federated, shared), _state_gap(ranking)]
    else:
        sentences = [_state_gap(ranking)]
    return " ".join(filter(None, (*sentences, _state_personal(ranking))))


def list_caveats(comparison: Comparison) -> list[str]:
    """List what qualifies the verdict: runs that failed, a single seed, personal parts."""
    summaries = comparison.summaries()
    sentences = (
        *(_tell_diverged(summary) for summary in summaries),
        _tell_ended(comparison.runs, "stopped early", " by a callback"),
        _tell_ended(comparison.runs, "stopped", " for lack of valid replies"),
        _tell_ended(comparison.runs, "interrupted"),
        _tell_missing(comparison.missing),
        _tell_one_seed(comparison.runs),
        _tell_personal(comparison),
    )
    return [sentence for sentence in sentences if sentence]


def _format_accuracy(summary: Summary) -> str:
    seeds = sum(bool(run.history) for run in summary.runs)
    return f"{format_mean(summary.accuracy, summary.spread, seeds)} %"


def _name_winner(ranked: Sequence[Summary], federated: Sequence[Summary]) -> str:
    if not federated:
        return "No federated strategy was run."
    if not ranked:
        return "No federated strategy has a result."
    best, worst = ranked[0], ranked[-1]
    if len(ranked) == 1:
        only = "" if len(federated) == 1 else ", the only federated strategy with a result"
        return f"{best.strategy} ends at {_format_accuracy(best)}{only}."
    if format_percent(best.accuracy) == format_percent(worst.accuracy):
        some = " with a result" if len(ranked) < len(federated) else ""
        level = format_percent(best.accuracy)
        return f"{len(ranked)} federated strategies{some} end level at {level} %."
    return (
        f"{best.strategy} ends highest with {_format_accuracy(best)}, {worst.strategy} lowest with "
        f"{_format_accuracy(worst)}{_count_ranked(ranked, federated)}."
        f"{_doubt_lead(best, ranked[1])}"
    )


def _count_ranked(ranked: Sequence[Summary], federated: Sequence[Summary]) -> str:
    if len(ranked) < len(federated):
        return f", of {len(ranked)} federated strategies with a result"
    return f", of {len(federated)} federated strategies" if ranked[2:] else ""


def _doubt_lead(best: Summary, second: Summary) -> str:
    """Say if the second is level, or if the lead is within the spread over seeds."""
    if format_percent(best.accuracy) == format_percent(second.accuracy):
        return f" {second.strategy} is level with it."
    lead = measure_lead(best, second)
    if lead > max(best.spread, second.spread):
        return ""
    points = f"{format_percent(lead)} points"
    return f" Its lead over {second.strategy} ({points}) is within the spread over seeds."


def _state_gap(ranking: Ranking) -> str:
    reference, ranked = ranking.reference, ranking.federated
    if reference is None:
        return ""
    name = f"{reference.strategy} ({_format_accuracy(reference)})"
    if not ranked:
        return f"The reference {reference.strategy} ends at {_format_accuracy(reference)}."
    lead = measure_lead(ranked[0], reference)
    points = format_percent(abs(lead))
    if points == format_percent(0.0):
        return f"{ranked[0].strategy} is level with {name}."
    side = "above" if lead > 0 else "below"
    return f"{ranked[0].strategy} is {points} points {side} {name}."


def _state_personal(ranking: Ranking) -> str:
    """State the results of personal models, which are not compared with those of global ones."""
    listed = [f"{s.strategy} {_format_accuracy(s)}" for s in ranking.personal]
    return f"Personal models, in the mean over clients: {list_names(listed)}." if listed else ""


def _tell_diverged(summary: Summary) -> str:
    diverged = [run for run in summary.runs if run.status == "diverged"]
    total = len(summary.runs)
    if not diverged:
        return ""
    if len(diverged) == total:
        return f"{summary.strategy} diverged{' with every seed' if total > 1 else ''}."
    evaluated = all(run.history for run in diverged)
    covers = (
        "includes the last evaluation before that" if evaluated else "covers evaluated runs only"
    )
    return f"{summary.strategy} diverged with {len(diverged)} of {total} seeds; its mean {covers}."


def _tell_ended(runs: Sequence[RunResult], status: str, why: str = "") -> str:
    count = sum(run.status == status for run in runs)
    were = "1 run was" if count == 1 else f"{count} runs were"
    return f"{were} {status}{why}; the last evaluation counts." if count else ""


def _tell_missing(names: Sequence[str]) -> str:
    if not names:
        return ""
    are = "1 run is" if len(names) == 1 else f"{len(names)} runs are"
    return f"{are} not finished and left out: {list_names(names)}."


def _tell_one_seed(runs: Sequence[RunResult]) -> str:
    one = len({run.seed for run in runs}) == 1 and len(runs) > 1
    return "With one seed, small differences may be chance." if one else ""


def _tell_personal(comparison: Comparison) -> str:
    summaries = comparison.summaries()
    personal = [s.strategy for s in summaries if any(run.personal for run in s.runs)]
    if not personal:
        return ""
    return (
        f"For {', '.join(personal)} there is no global model: {comparison.metric} is the mean over "
        f"clients, each on {comparison.tested_on}."
    )
