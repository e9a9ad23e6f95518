"""State the result in a few sentences that agree with the table."""

from collections.abc import Sequence

from fednorm.experiment.results import Comparison, RunResult, Summary
from fednorm.report.format import format_mean, format_percent, keep_finite
from fednorm.report.styles import find_known_name


def state_verdict(comparison: Comparison) -> str:
    """Say which federated strategy ends highest and lowest, and how far from `centralized`."""
    summaries = comparison.summaries()
    if not summaries:
        return "Nothing was run."
    federated = [s for s in summaries if find_known_name(s.strategy) != "centralized"]
    references = [s for s in summaries if s not in federated]
    ranked = _rank(federated)
    return " ".join(
        filter(None, (_name_winner(ranked, federated), _state_gap(ranked, _rank(references))))
    )


def list_caveats(comparison: Comparison) -> list[str]:
    """List what qualifies the verdict: runs that failed, a single seed, personal parts."""
    summaries = comparison.summaries()
    sentences = (
        *(_tell_diverged(summary) for summary in summaries),
        _tell_ended(comparison.runs, "stopped", " for lack of valid replies"),
        _tell_ended(comparison.runs, "interrupted"),
        _tell_one_seed(comparison.runs),
        _tell_personal(comparison),
    )
    return [sentence for sentence in sentences if sentence]


def _rank(summaries: Sequence[Summary]) -> list[Summary]:
    """Sort the strategies with a result, best first; those that diverged have none."""
    having = [s for s in summaries if keep_finite(s.accuracy) is not None and not has_diverged(s)]
    return sorted(having, key=lambda s: -(s.accuracy or 0.0))


def has_diverged(summary: Summary) -> bool:
    """Return whether every seed diverged; the last evaluation is then not a result."""
    return all(run.status == "diverged" for run in summary.runs)


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
    lead = (best.accuracy or 0.0) - (second.accuracy or 0.0)
    if lead > max(best.spread, second.spread):
        return ""
    points = f"{format_percent(lead)} points"
    return f" Its lead over {second.strategy} ({points}) is within the spread over seeds."


def _state_gap(ranked: Sequence[Summary], references: Sequence[Summary]) -> str:
    if not references:
        return ""
    reference = references[0]
    name = f"{reference.strategy} ({_format_accuracy(reference)})"
    if not ranked:
        return f"The reference {reference.strategy} ends at {_format_accuracy(reference)}."
    gap = (reference.accuracy or 0.0) - (ranked[0].accuracy or 0.0)
    points = format_percent(abs(gap))
    if points == format_percent(0.0):
        return f"{ranked[0].strategy} is level with {name}."
    side = "below" if gap > 0 else "above"
    return f"{ranked[0].strategy} is {points} points {side} {name}."


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
