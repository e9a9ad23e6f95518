"""State the result in a few sentences that agree with the table."""

from collections.abc import Sequence

from fednorm.experiment.results import Comparison, RunResult, Summary
from fednorm.report.format import format_mean, format_percent, list_names
from fednorm.report.outcome.ranking import Ranking, is_personal, is_reference, measure_lead, rank


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
        _tell_ended(comparison.runs, "stopped", " for lack of valid replies"),
        _tell_ended(comparison.runs, "interrupted"),
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
