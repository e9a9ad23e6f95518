"""The sentences of a recommendation; every claim carries a number that the report shows."""

from fednorm.doctor.facts import Facts
from fednorm.doctor.findings import Gradient
from fednorm.doctor.numbers import count, number, percent, some


def gradient(facts: Facts, strategy: str, statistics: str) -> Gradient | None:
    """Return a measured gradient."""
    measured = facts.clients.gradients if facts.clients else ()
    found = [g for g in measured if (g.strategy, g.statistics) == (strategy, statistics)]
    return found[0] if found else None


def deviation(facts: Facts, strategy: str, statistics: str) -> float | None:
    """Return a measured deviation."""
    found = gradient(facts, strategy, statistics)
    return found.deviation if found else None


def no_batch_norm(facts: Facts) -> str:
    """Say that there is nothing to choose."""
    return (
        f"0 of {len(facts.layers)} normalization layers are BatchNorm, so there is nothing to "
        f"mend; {len(facts.refusing)} of {len(facts.costs)} strategies refuse the model."
    )


def no_data(facts: Facts) -> str:
    """Say what is missing."""
    return (
        f"how far the clients are apart in the {len(facts.batch_norms)} BatchNorm layers decides, "
        "and it is not known; give --data and --partition."
    )


def nothing(facts: Facts) -> str:
    """Say that nothing is left."""
    return f"{len(facts.refusing)} of {len(facts.costs)} strategies refuse the model."


def naive(facts: Facts, most_bias: float, most_deviation: float) -> list[str]:
    """Compare what `naive` does with its limits."""
    said = []
    layers = [x for x in (facts.clients.layers if facts.clients else ()) if x.excess is not None]
    if layers:
        worst = max(layers, key=lambda x: x.excess or 0.0)
        said.append(
            f"plain averaging lacks {percent(worst.bias)} of the variance in layer "
            f"{worst.path!r}, the worst, and {percent(worst.bias_alike)} for clients alike: an "
            f"excess of {percent(worst.excess)}, {_against(worst.excess, most_bias)} "
            f"{percent(most_bias)}."
        )
    found = gradient(facts, "naive", "batch")
    if found and found.excess is not None:
        said.append(
            f"the gradient of naive deviates by {number(found.deviation)}, and by "
            f"{number(found.alike)} for clients alike: an excess of {number(found.excess)}, "
            f"{_against(found.excess, most_deviation)} {number(most_deviation)}."
        )
    elif found and found.refused:
        said.append(f"naive cannot be measured: {found.refused}")
    return said


def _against(value: float | None, limit: float) -> str:
    return "under" if (value or 0.0) < limit else "not under"


def personal(facts: Facts, least: float) -> str:
    """Say why personal layers fit."""
    taking_part, trained = facts.taking_part
    cost = facts.cost("fedbn")
    return (
        f"every client is tested on its own data (evaluate = clients), and {taking_part} of "
        f"{trained} take part in a round ({percent(taking_part / trained)}, at least "
        f"{percent(least)}); {count(cost.personal_bytes if cost else None)} B stay on each client."
    )


def closer(facts: Facts, least: float) -> str:
    """Compare the gradients with surveyed statistics."""
    measured = {name: deviation(facts, name, "surveyed") for name in ("fbn", "dualbn")}
    listed = [f"{number(d)} ({name})" for name, d in measured.items() if d is not None]
    gain = f"; dualbn is taken if it is closer by {number(least)}" if len(listed) > 1 else ""
    return f"with surveyed statistics, gradients deviate by {' and '.join(listed)}{gain}."


def not_closer(facts: Facts) -> str:
    """Say why shared statistics were not chosen."""
    naive_ = deviation(facts, "naive", "batch")
    listed = [
        f"{name} {number(d)}"
        for name in ("fbn", "dualbn")
        if (d := deviation(facts, name, "surveyed")) is not None
    ]
    if not listed:
        return "neither fbn nor dualbn could be measured on this model."
    return f"shared statistics come no closer than naive ({number(naive_)}): {some(listed)}."


def standing(facts: Facts) -> str:
    """Say where BatchNorm stands."""
    after = sum(layer.place == "convolution" for layer in facts.batch_norms)
    return (
        f"{after} of {len(facts.batch_norms)} BatchNorm layers directly follow a convolution; "
        "convolutions are what dualbn standardises, so that statistics of the round before hold."
    )


def single(facts: Facts) -> str:
    """Say which clients have batches of one."""
    left_out = facts.clients.left_out if facts.clients else ()
    return (
        f"{len(left_out)} of {facts.taking_part[1]} clients ({some(left_out)}) have batches of 1 "
        f"sample (batch = {facts.experiment.batch}), which rules out all strategies that normalise "
        "by the batch."
    )


def price(facts: Facts, strategy: str) -> str:
    """Say what a strategy sends."""
    cost = facts.cost(strategy)
    if cost is None:
        return ""
    rounds = ", and must know the number of rounds" if cost.needs_rounds else ""
    return (
        f"{strategy} sends {count(cost.bytes_up)} B up and {count(cost.bytes_down)} B down per "
        f"client and round, in {cost.exchanges} exchange{'s' if cost.exchanges != 1 else ''}"
        f"{rounds}."
    )


def exact(facts: Facts) -> str:
    """Say what the exact method would cost."""
    cost, found = facts.cost("fedtan"), deviation(facts, "fedtan", "exchanged")
    if cost is None or found is None:
        return ""
    return f"fedtan deviates by {number(found)}, at {cost.exchanges} exchanges a round."
