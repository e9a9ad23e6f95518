"""Spread over seeds, and the significance of differences between strategies.

Spread is the sample standard deviation, which divides by n − 1, or half the 95 % confidence
interval of the mean by Student's t.

Significance is paired over seeds, since runs of one seed share data, batches and initial weights,
and two-sided: Student's t test, or the exact permutation test, which flips the signs of the
differences and whose p cannot be below 2 / 2ⁿ. P values of one table are corrected after S. Holm,
"A Simple Sequentially Rejective Multiple Test Procedure", 1979.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, isfinite, lgamma, log, log1p, sqrt
from statistics import fmean, stdev
from typing import Any, Literal, TypeAlias

from fednorm.errors import ConfigError

Spread: TypeAlias = Literal["std", "ci95"]
Test: TypeAlias = Literal["t", "permutation", "none"]
Record: TypeAlias = Mapping[str, Any]  # a row of a table: plain numbers by column

SPREADS: dict[Spread, str] = {
    "std": "sample standard deviation",
    "ci95": "half of the 95 % confidence interval (Student's t)",
}
TESTS: dict[Test, str] = {
    "t": "paired t test",
    "permutation": "exact paired permutation test",
    "none": "",
}
_BASELINE = "naive"
_LEVEL = 0.05  # outside of the confidence interval
_MOST_FLIPPED = 20  # seeds of an exact test
_ROUNDING = 1e-12
_TERMS = 1000  # of a continued fraction; about 30 are usual


def measure_spread(values: Sequence[float], kind: Spread = "std") -> float:
    """Return the spread of values over seeds; a single value has none.

    >>> round(measure_spread([0.8, 0.9, 1.0]), 3), round(measure_spread([0.8, 0.9, 1.0], "ci95"), 3)
    (0.1, 0.248)
    """
    if len(values) <= 1:
        return 0.0
    deviation = stdev(values)
    if kind == "std":
        return deviation
    return find_quantile(len(values) - 1) * deviation / sqrt(len(values))


def find_tail(t: float, freedom: int) -> float:
    """Return the two-sided p of Student's t with `freedom` degrees of freedom.

    >>> round(find_tail(4.303, 2), 3), round(find_tail(-4.303, 2), 3)
    (0.05, 0.05)
    """
    if not isfinite(t):
        return 0.0
    return _integrate_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def find_quantile(freedom: int) -> float:
    """Return the t beyond which 2.5 % of Student's distribution lie on each side."""
    low, high = 0.0, 1.0
    while find_tail(high, freedom) > _LEVEL:
        high *= 2
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2
        low, high = (middle, high) if find_tail(middle, freedom) > _LEVEL else (low, middle)
    return high


def _integrate_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _integrate_beta(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    value, c, d = 1.0, 1.0, 0.0
    for step in range(_TERMS):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        value *= c * d
        if abs(1 - c * d) < _ROUNDING / 100:
            break
    return front * (value - 1)


def compute_p(differences: Sequence[float], test: Test = "t") -> float | None:
    """Return the p of paired differences having no mean, or None for fewer than two of them.

    >>> round(compute_p([0.10, 0.12, 0.08]), 4), compute_p([0.10, 0.12, 0.08], "permutation")
    (0.0131, 0.25)
    """
    count = len(differences)
    if count <= 1 or test == "none":
        return None
    mean, deviation = fmean(differences), stdev(differences)
    if test == "t":
        if deviation <= _ROUNDING:
            return 1.0 if abs(mean) <= _ROUNDING else 0.0
        return find_tail(mean / deviation * sqrt(count), count - 1)
    if count > _MOST_FLIPPED:
        raise ConfigError(
            f"the permutation test is exact and takes at most {_MOST_FLIPPED} seeds, but there are "
            f"{count}; use the t test."
        )
    least = abs(sum(differences)) - _ROUNDING
    flipped = product((1, -1), repeat=count)
    sums = (abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flipped)
    return fmean(one >= least for one in sums)


def correct_holm(found: Mapping[str, float]) -> dict[str, float]:
    """Return the p values corrected for their number after Holm (1979).

    >>> correct_holm({"fbn": 0.01, "gn": 0.04, "ln": 0.03})
    {'fbn': 0.03, 'gn': 0.06, 'ln': 0.06}
    """
    corrected, least = {}, 0.0
    for place, (label, p) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, p * (len(found) - place)))
        corrected[label] = least
    return {label: corrected[label] for label in found}


@dataclass(frozen=True)
class TableSpec:
    """How strategies are summarised: their spread, and what they are compared with."""

    spread: Spread = "std"
    against: str | None = None  # label of a strategy; `naive` if it was run; "" for none
    test: Test = "t"

    def find_reference(self, runs: Sequence[Record]) -> str | None:
        """Return the label that others are compared with; it must be one of the runs'."""
        labels = list(dict.fromkeys(run["strategy"] for run in runs))
        if self.against == "":
            return None
        if self.against is not None:
            if self.against not in labels:
                raise ConfigError(
                    f"no strategy {self.against!r} to compare with; there are {', '.join(labels)}."
                )
            return self.against
        plain = list(dict.fromkeys(run["strategy"] for run in runs if run["name"] == _BASELINE))
        return plain[0] if len(plain) == 1 else None


USUAL = TableSpec()
_MEANS = (
    *("best_accuracy", "worst_client", "trained", "untrained", "attack_success"),
    *("exchanges_per_round", "bytes_up_per_round", "bytes_down_per_round", "seconds"),
)


def summarize_runs(runs: Sequence[Record], spec: TableSpec = USUAL) -> list[dict[str, Any]]:
    """Return a row of plain numbers for each strategy: means over seeds, spread, difference, p."""
    reference = spec.find_reference(runs)
    by_label: dict[str, list[Record]] = {}
    for run in runs:
        by_label.setdefault(run["strategy"], []).append(run)
    rows = {label: _summarize(label, own, spec) for label, own in by_label.items()}
    if reference is not None:
        pairs = {
            label: _pair(own, by_label[reference])
            for label, own in by_label.items()
            if label != reference and _is_comparable(own, by_label[reference])
        }
        tested = {k: p for k, of in pairs.items() if (p := compute_p(of, spec.test)) is not None}
        corrected = correct_holm(tested)
        for label, row in rows.items():
            differences = pairs.get(label)
            row["reference"] = reference
            row["difference"] = fmean(differences) if differences else None
            row["pairs"] = len(differences or ())
            row |= {"p": tested.get(label), "p_holm": corrected.get(label)}
    return list(rows.values())


def _summarize(label: str, runs: Sequence[Record], spec: TableSpec) -> dict[str, Any]:
    values = [run["accuracy"] for run in runs if _is_number(run["accuracy"])]
    return {
        "strategy": label,
        "name": runs[0]["name"],
        "seeds": len(values),
        "accuracy": fmean(values) if values else None,
        "spread": measure_spread(values, spec.spread) if len(values) > 1 else None,
        "spread_kind": spec.spread,
        **{key: _average(run[key] for run in runs) for key in _MEANS},
        "epsilon": max(
            (run["epsilon"] for run in runs if run["epsilon"] is not None), default=None
        ),
        "personal": any(run["personal"] for run in runs),
        "diverged": sum(run["status"] == "diverged" for run in runs),
        "runs": len(runs),
    }


def _is_number(value: Any) -> bool:
    return value is not None and isfinite(value)


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return fmean(known) if known else None


def _is_comparable(one: Sequence[Record], other: Sequence[Record]) -> bool:
    """Return whether two strategies have results on the same test data, in the same setting."""
    alike = any(r["personal"] for r in one) == any(r["personal"] for r in other)
    return (
        alike
        and one[0]["setting"] == other[0]["setting"]
        and not any(all(r["status"] == "diverged" for r in of) for of in (one, other))
    )


def _pair(one: Sequence[Record], other: Sequence[Record]) -> list[float]:
    """Return the differences of the seeds that both have."""
    mine, theirs = (
        {run["seed"]: run["accuracy"] for run in of if _is_number(run["accuracy"])}
        for of in (one, other)
    )
    return [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
