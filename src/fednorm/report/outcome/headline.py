"""Tell the outcome of a comparison in one sentence.

The story is what ordinary BatchNorm loses against centralized training, and which methods win it
back. Where one of the two was not run, or entries differ in more than the method, the sentence says
less. Differences within the noise are not told as differences.
"""

from collections.abc import Sequence

from fednorm.experiment.results import Comparison, Summary
from fednorm.report.format import capitalize, format_percent
from fednorm.report.outcome.ranking import (
    Ranking,
    find_baseline,
    has_diverged,
    is_level,
    is_uniform,
    measure_lead,
    rank,
)

WON_BACK = 0.9  # share of the loss
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
        return _tell_best(ranking.federated)
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
