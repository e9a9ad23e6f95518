"""Rank strategies, each among its kind, and tell the outcome in one sentence, the headline.

The reference on one machine is not a federated strategy. Personal models are tested on other data
than a global model, so the two are ranked apart.

The story of a headline is what ordinary BatchNorm loses against centralized training, and which
methods win it back. Where one of the two was not run, or entries differ in more than the method,
the sentence says less. Differences within the noise are not told as differences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from fednorm.experiment.results import Comparison, Summary
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.experiment.summary.result_table import format_percent, keep_finite
from fednorm.report.format import capitalize
from fednorm.report.styles import find_known_name


@dataclass(frozen=True)
class Ranking:
    """The strategies with a result, best first; one that diverged has none."""

    references: tuple[Summary, ...]
    federated: tuple[Summary, ...]  # with one global model
    personal: tuple[Summary, ...]  # the mean over clients

    @property
    def reference(self) -> Summary | None:
        """The reference that others are compared with: plain `centralized` if it was run."""
        plain = [s for s in self.references if s.strategy == "centralized"]
        return next(iter((*plain, *self.references)), None)


def rank(comparison: Comparison) -> Ranking:
    """Rank the strategies of a comparison."""
    summaries = comparison.summaries()
    having = [s for s in summaries if keep_finite(s.accuracy) is not None and not has_diverged(s)]
    ordered = sorted(having, key=lambda s: -(s.accuracy or 0.0))
    references = [s for s in ordered if is_reference(comparison, s)]
    federated = [s for s in ordered if s not in references]
    return Ranking(
        references=tuple(references),
        federated=tuple(s for s in federated if not is_personal(s)),
        personal=tuple(s for s in federated if is_personal(s)),
    )


def find_baseline(comparison: Comparison) -> Summary | None:
    """Return ordinary BatchNorm (`naive`), unless it was run more than once or never."""
    found = [s for s in comparison.summaries() if _find_name(comparison, s) == "naive"]
    return found[0] if len(found) == 1 else None


def is_reference(comparison: Comparison, summary: Summary) -> bool:
    """Return whether a strategy trained on one machine."""
    return _find_name(comparison, summary).partition(":")[0] == "centralized"


def is_personal(summary: Summary) -> bool:
    """Return whether clients keep layers, so that there is no global model."""
    return any(run.personal for run in summary.runs)


def is_uniform(comparison: Comparison) -> bool:
    """Return whether all strategies have the same data and attacks; rates may differ."""
    entries = comparison.config.get("strategies", [])
    own = set(OWN_SETTINGS) - {"algorithm"}
    return not any(isinstance(entry, Mapping) and entry.keys() & own for entry in entries)


def has_diverged(summary: Summary) -> bool:
    """Return whether every seed diverged; the last evaluation is then not a result."""
    return all(run.status == "diverged" for run in summary.runs)


def measure_lead(one: Summary, other: Summary) -> float:
    """Return how much better `one` ends than `other`, as a fraction; negative if it is worse."""
    return (one.accuracy or 0.0) - (other.accuracy or 0.0)


def is_level(one: Summary, other: Summary) -> bool:
    """Return whether two strategies differ by no more than noise."""
    return abs(measure_lead(one, other)) <= max(estimate_noise(one), estimate_noise(other))


def estimate_noise(summary: Summary, *, best: bool = False) -> float:
    """Return the sample standard deviation over seeds, or the test's standard error if larger.

    The number of test samples leaves a standard error even where there is one seed. It is that of
    the final accuracy, or of the best one.
    """
    spread = keep_finite(summary.spread) or 0.0
    mean = keep_finite(summary.best if best else summary.accuracy)
    tested = min((run.tested for run in summary.runs), default=0)
    if not tested or mean is None or any(run.metric != "accuracy" for run in summary.runs):
        return spread
    return max(spread, sqrt(mean * (1 - mean) / tested / len(summary.runs)))


def _find_name(comparison: Comparison, summary: Summary) -> str:
    """Return the strategy's registered name; labels are free text."""
    label = summary.strategy
    return comparison.find_entry(label).get("name") or find_known_name(label) or label


# The headline.

WON_BACK = 0.9  # share of the loss
_VISIBLE = 0.03  # a difference that a reader sees, even where seeds differ by as much
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_LETTERS = 30  # of names; if there are more, the methods are counted
_WHOLE = 10  # points; fewer are written with a decimal
_CENTRALIZED = "centralized training"


def write_headline(comparison: Comparison) -> str:
    """Return the outcome in one sentence, without a full stop."""
    told = _tell(comparison)
    first = told.split(" ", 1)[0]  # a strategy's name is not capitalized
    return capitalize(told) if first in _NUMBERS else told


def _tell(comparison: Comparison) -> str:
    ranking, baseline = rank(comparison), find_baseline(comparison)
    if not ranking.federated:
        return _tell_without_ranked(comparison, ranking)
    if not is_uniform(comparison):
        return _tell_range(comparison.metric, ranking.federated)
    ranked = {s.strategy for s in ranking.federated}
    if baseline is None or not (baseline.strategy in ranked or has_diverged(baseline)):
        return _tell_distance(ranking) if ranking.reference else _tell_best(ranking.federated)
    others = [s for s in ranking.federated if s.strategy != baseline.strategy]
    if has_diverged(baseline):
        return f"{_name_baseline(baseline)} diverges; {_tell_best(others)}"
    if ranking.reference:
        return _tell_loss(baseline, ranking.reference, others)
    return _tell_gain(baseline, others)


def list_winners(reference: Summary, baseline: Summary, others: Sequence[Summary]) -> list[Summary]:
    """Return the methods that win back what the baseline loses, to nine tenths or within noise."""
    loss = measure_lead(reference, baseline)
    return [
        s
        for s in others
        if measure_lead(reference, s) <= (1 - WON_BACK) * loss
        or (is_level(s, reference) and not is_level(s, baseline))
    ]


def _tell_loss(baseline: Summary, reference: Summary, others: Sequence[Summary]) -> str:
    name, loss = _name_baseline(baseline), measure_lead(reference, baseline)
    if is_level(reference, baseline):
        if loss > _VISIBLE:
            return f"{name} ends {_format_points(loss)} below {_CENTRALIZED}, which may be chance"
        return f"{name} keeps up with {_CENTRALIZED} here"
    if loss < 0:
        return f"{name} ends {_format_points(-loss)} above {_CENTRALIZED}"
    lost = f"{name} loses {_format_points(loss)}"
    if winners := list_winners(reference, baseline, others):
        return f"{lost}; {_list_methods(winners, 'wins', 'win')} them back"
    if others and not is_level(others[0], baseline) and measure_lead(others[0], baseline) > 0:
        gained = _format_points(measure_lead(others[0], baseline))
        return f"{lost}; {others[0].strategy} wins back {gained}"
    return f"{lost}, and no method clearly wins them back" if others else lost


def _tell_gain(baseline: Summary, others: Sequence[Summary]) -> str:
    """Compare with ordinary BatchNorm alone."""
    name = _name_baseline(baseline)
    if not others:
        return _tell_best([baseline])
    better = [s for s in others if measure_lead(s, baseline) > 0 and not is_level(s, baseline)]
    if not better:
        return f"no method ends above {name}"
    most = _format_points(measure_lead(better[0], baseline))
    up_to = "up to " if len(better) > 1 else ""
    return f"{_list_methods(better, 'ends', 'end')} {up_to}{most} above {name}"


def _tell_distance(ranking: Ranking) -> str:
    """Compare with centralized training alone."""
    reference, best = ranking.reference, ranking.federated[0]
    if reference is None or is_level(best, reference):
        level = [s for s in ranking.federated if reference and is_level(s, reference)]
        return f"{_list_methods(level, 'ends', 'end')} level with {_CENTRALIZED}"
    lead = measure_lead(best, reference)
    side = "above" if lead > 0 else "below"
    return f"{best.strategy} ends {_format_points(abs(lead))} {side} {_CENTRALIZED}"


def _tell_best(ranked: Sequence[Summary], suffix: str = "") -> str:
    """Say which strategies end highest, without comparing them with anything else."""
    level = [s for s in ranked if is_level(s, ranked[0])]
    accuracy = f"{format_percent(ranked[0].accuracy)} %{suffix}"
    if len(ranked) == 1:
        return f"{ranked[0].strategy} ends at {accuracy}"
    if len(level) == len(ranked):
        return f"{_count(len(ranked))} strategies end level at about {accuracy}"
    if len(level) > 1:
        return f"{_list_methods(level, 'ends', 'end')} highest, level at {accuracy}"
    lead = _format_points(measure_lead(ranked[0], ranked[1]))
    return f"{ranked[0].strategy} ends highest with {accuracy}, {lead} above the next"


def _tell_range(metric: str, ranked: Sequence[Summary]) -> str:
    """Say how far apart strategies with different data or attacks are; none of them wins."""
    if len(ranked) == 1:
        return _tell_best(ranked)
    low, high = (format_percent(one.accuracy) for one in (ranked[-1], ranked[0]))
    return f"{capitalize(metric)} from {low} to {high} %, by strategy and setting"


def _tell_without_ranked(comparison: Comparison, ranking: Ranking) -> str:
    if ranking.personal:
        return _tell_best(ranking.personal, " in the mean over clients")
    if not comparison.runs:
        return "Nothing was run"
    if ranking.reference and len(comparison.summaries()) == len(ranking.references):
        return f"{_tell_best([ranking.reference])}; no federated strategy was run"
    return "No federated strategy has a result"


def _name_baseline(baseline: Summary) -> str:
    """Return "BatchNorm" if the network has such layers, else the strategy's label."""
    known = any("BatchNorm" in note for run in baseline.runs for note in run.conversion)
    return "BatchNorm" if known else baseline.strategy


def _list_methods(methods: Sequence[Summary], verb: str, plural: str) -> str:
    *first, last = [s.strategy for s in methods]
    if not first:
        return f"{last} {verb}"
    names = f"{', '.join(first)} and {last}"
    listed = names if len(names) <= _LETTERS else f"{_count(len(methods))} methods"
    return f"{listed} {plural}"


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _format_points(lead: float) -> str:
    """Write a difference of fractions in points.

    >>> _format_points(0.354), _format_points(0.0123), _format_points(0.01)
    ('35 points', '1.2 points', '1.0 points')
    """
    points = round(100 * lead, 6)  # 0.9 − 0.8 is 0.1
    return f"{points:.0f} points" if points >= _WHOLE else f"{points:.1f} points"
