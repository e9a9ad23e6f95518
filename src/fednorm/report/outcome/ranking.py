"""Rank strategies, each among its kind, and tell differences from noise.

The reference on one machine is not a federated strategy. Personal models are tested on other data
than a global model, so the two are ranked apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from fednorm.experiment.results import Comparison, Summary
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.report.format import keep_finite
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
    """Return the standard deviation over seeds, or the standard error of the test if larger.

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
    for entry in comparison.config.get("strategies", []):
        name = str(entry.get("name", "")) if isinstance(entry, Mapping) else str(entry)
        label = entry.get("label") if isinstance(entry, Mapping) else None
        if (label or name) == summary.strategy:
            return name
    return find_known_name(summary.strategy) or summary.strategy
