"""Recommend a strategy and give reasons, with the numbers behind them.

The first rule that applies decides. Every reason quotes numbers that the report shows. `alike` is
the same measurement with samples dealt to clients at random: small batches differ by chance under
every strategy.
"""

from collections.abc import Callable
from typing import TypeAlias

from fednorm.doctor.findings import Examination, Recommendation
from fednorm.report.format import format_number, format_ratio, format_share, list_names

# Plain averaging may miss this much more of a layer's variance than with samples dealt at random.
MOST_BIAS = 0.01
# The gradient of `naive` may deviate by this much more than with samples dealt at random.
MOST_DEVIATION = 0.05
# Personal layers are advised where at least this share of the clients takes part in a round.
LEAST_SHARE = 0.5
# `dualbn` sends more than `fbn`: it must be closer to one machine by this much.
LEAST_GAIN = 0.05

THRESHOLDS = {
    "most_bias": MOST_BIAS,
    "most_deviation": MOST_DEVIATION,
    "least_share": LEAST_SHARE,
    "least_gain": LEAST_GAIN,
}

Rule: TypeAlias = Callable[[Examination], Recommendation | None]


def _give(strategy: str | None, *reasons: str) -> Recommendation:
    return Recommendation(strategy, tuple(r for r in reasons if r), THRESHOLDS)


def recommend_without_batch_norm(exam: Examination) -> Recommendation | None:
    """Recommend `none` without BatchNorm: there is nothing to choose."""
    if exam.batch_norms:
        return None
    return _give(
        "none",
        f"0 of {len(exam.layers)} normalization layers are BatchNorm, so there is nothing to "
        f"fix; {describe_refusals(exam)}",
    )


def recommend_without_data(exam: Examination) -> Recommendation | None:
    """Recommend nothing without data."""
    if exam.clients:
        return None
    return _give(
        None,
        f"the choice depends on how far the clients are apart in the {len(exam.batch_norms)} "
        "BatchNorm layers, which is not known without --data and --partition.",
    )


def recommend_naive(exam: Examination) -> Recommendation | None:
    """Recommend `naive` if clients differ no more than by chance."""
    if (
        exam.find_cost("naive") is None
        or _has_single_batches(exam)
        or exceeds_limits(exam) is not False
    ):
        return None
    return _give("naive", *describe_naive(exam), describe_cost(exam, "naive"))


def recommend_personal_layers(exam: Examination) -> Recommendation | None:
    """Recommend `fedbn` if each client is tested on its own data and often takes part."""
    taking_part, trained = exam.taking_part
    tested = exam.experiment.evaluate == "clients"
    share, cost = taking_part / trained, exam.find_cost("fedbn")
    if not tested or share < LEAST_SHARE or _has_single_batches(exam) or cost is None:
        return None
    return _give(
        "fedbn",
        *describe_naive(exam),
        f"every client is tested on its own data (evaluate = clients), and {taking_part} of "
        f"{trained} take part in a round ({format_share(share)}, at least "
        f"{format_share(LEAST_SHARE)}); "
        f"{format_number(cost.personal_bytes)} B stay on each client.",
        describe_cost(exam, "fedbn"),
    )


def recommend_shared_statistics(exam: Examination) -> Recommendation | None:
    """Recommend `fbn` or `dualbn` if it brings the gradient closer to one machine's."""
    naive = find_deviation(exam, "naive", "batch")
    found = {name: d for name, d in find_calibrated(exam).items() if exam.find_cost(name)}
    if not found:
        return None
    best = min(found, key=found.__getitem__)
    if naive is not None and found[best] >= naive:
        return None
    if best == "dualbn" and "fbn" in found and found["fbn"] - found[best] < LEAST_GAIN:
        best = "fbn"
    return _give(
        best,
        *describe_naive(exam),
        describe_calibrated(exam),
        describe_placement(exam) if best == "dualbn" else "",
        describe_cost(exam, best),
        describe_fedtan(exam),
    )


def recommend_for_single_samples(exam: Examination) -> Recommendation | None:
    """Recommend what needs no batch statistics if some clients have batches of one."""
    for name in ("fbn", "gn", "ln", "none"):
        if _has_single_batches(exam) and exam.find_cost(name) is not None:
            return _give(name, describe_single_batches(exam), describe_cost(exam, name))
    return None


def recommend_remaining(exam: Examination) -> Recommendation | None:
    """Recommend `fixbn`, whose second half has frozen statistics, or else no statistics."""
    for name in ("fixbn", "gn", "ln", "none"):
        if exam.find_cost(name) is not None:
            reasons = [*describe_naive(exam), describe_no_gain(exam), describe_cost(exam, name)]
            return _give(name, *reasons)
    return None


RULES: tuple[Rule, ...] = (
    recommend_without_batch_norm,
    recommend_without_data,
    recommend_naive,
    recommend_personal_layers,
    recommend_shared_statistics,
    recommend_for_single_samples,
    recommend_remaining,
)


def recommend(exam: Examination) -> Recommendation:
    """Return the recommendation of the first rule that applies."""
    found = (rule(exam) for rule in RULES)
    return next((advice for advice in found if advice), _give(None, describe_refusals(exam)))


def exceeds_limits(exam: Examination) -> bool | None:
    """Return whether `naive` exceeds a limit, or None if that was not measured."""
    clients = exam.clients
    gradient = exam.gradients.get(("naive", "batch"))
    if clients is None or gradient is None or gradient.excess is None:
        return None
    biases = [layer.excess for layer in clients.layers if layer.excess is not None]
    return gradient.excess >= MOST_DEVIATION or any(bias >= MOST_BIAS for bias in biases)


def _has_single_batches(exam: Examination) -> bool:
    return bool(exam.clients and exam.clients.left_out)


def find_deviation(exam: Examination, strategy: str, statistics: str) -> float | None:
    """Return a measured deviation."""
    found = exam.gradients.get((strategy, statistics))
    return found.deviation if found else None


def find_calibrated(exam: Examination) -> dict[str, float]:
    """Return the deviations with calibrated statistics, by strategy."""
    found = {name: find_deviation(exam, name, "calibrated") for name in ("fbn", "dualbn")}
    return {name: deviation for name, deviation in found.items() if deviation is not None}


def describe_refusals(exam: Examination) -> str:
    """Say how many strategies refuse the model."""
    return f"{len(exam.refusing)} of {len(exam.costs)} strategies refuse the model."


def describe_naive(exam: Examination) -> list[str]:
    """Compare what `naive` does with its limits."""
    said = []
    layers = [x for x in (exam.clients.layers if exam.clients else ()) if x.excess is not None]
    if layers:
        worst = max(layers, key=lambda x: x.excess or 0.0)
        said.append(
            f"plain averaging misses {format_share(worst.bias)} of the variance in layer "
            f"{worst.path!r}, the worst one, and {format_share(worst.bias_alike)} with "
            f"samples dealt at random: an excess of {format_share(worst.excess)}, "
            f"{_compare(worst.excess, MOST_BIAS)} {format_share(MOST_BIAS)}."
        )
    found = exam.gradients.get(("naive", "batch"))
    if found and found.excess is not None:
        said.append(
            f"the gradient of naive deviates by {format_ratio(found.deviation)}, and by "
            f"{format_ratio(found.alike)} with samples dealt at random: an excess of "
            f"{format_ratio(found.excess)}, {_compare(found.excess, MOST_DEVIATION)} "
            f"{format_ratio(MOST_DEVIATION)}."
        )
    elif found and found.refused:
        said.append(f"naive cannot be measured: {found.refused}")
    return said


def _compare(value: float | None, limit: float) -> str:
    return "under" if (value or 0.0) < limit else "not under"


def describe_calibrated(exam: Examination) -> str:
    """Compare the gradients with calibrated statistics."""
    listed = [f"{format_ratio(d)} ({name})" for name, d in find_calibrated(exam).items()]
    chosen = f"; dualbn is chosen if it is closer by {format_ratio(LEAST_GAIN)}"
    gain = chosen if len(listed) > 1 else ""
    return f"with calibrated statistics, gradients deviate by {' and '.join(listed)}{gain}."


def describe_no_gain(exam: Examination) -> str:
    """Say why shared statistics were not chosen."""
    naive = find_deviation(exam, "naive", "batch")
    listed = [f"{name} {format_ratio(d)}" for name, d in find_calibrated(exam).items()]
    if not listed:
        return "neither fbn nor dualbn could be measured on this model."
    shared = list_names(listed)
    return f"shared statistics come no closer than naive ({format_ratio(naive)}): {shared}."


def describe_placement(exam: Examination) -> str:
    """Say how many BatchNorm layers follow a convolution."""
    after = sum(layer.place == "convolution" for layer in exam.batch_norms)
    return (
        f"{after} of {len(exam.batch_norms)} BatchNorm layers directly follow a convolution; "
        "dualbn standardises convolutions, so that the statistics of the last round stay valid."
    )


def describe_single_batches(exam: Examination) -> str:
    """Say which clients have batches of one."""
    left_out = exam.clients.left_out if exam.clients else ()
    return (
        f"{len(left_out)} of {exam.taking_part[1]} clients ({list_names(left_out)}) have batches "
        f"of 1 sample (batch_size = {exam.experiment.batch_size}), which rules out all strategies "
        "that normalise by the batch."
    )


def describe_cost(exam: Examination, strategy: str) -> str:
    """Say what a strategy sends."""
    cost = exam.find_cost(strategy)
    if cost is None:
        return ""
    rounds = ", and must know the number of rounds" if cost.needs_rounds else ""
    return (
        f"{strategy} sends {format_number(cost.bytes_up)} B up and "
        f"{format_number(cost.bytes_down)} B down per client and round, in "
        f"{cost.exchanges} exchange{'s' if cost.exchanges != 1 else ''}"
        f"{rounds}."
    )


def describe_fedtan(exam: Examination) -> str:
    """Say what the exact method would cost."""
    cost, found = exam.find_cost("fedtan"), find_deviation(exam, "fedtan", "exchanged")
    if cost is None or found is None:
        return ""
    return f"fedtan deviates by {format_ratio(found)}, at {cost.exchanges} exchanges a round."
