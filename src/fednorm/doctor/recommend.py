"""Which strategy, and why: rules in order, each with the numbers that it rests on.

The first rule that applies decides. `alike` below is the same measurement with the samples dealt
to the clients at random: small batches differ by chance, and no strategy is to blame for that.
"""

from collections.abc import Callable
from typing import TypeAlias

from fednorm.doctor import reasons as because
from fednorm.doctor.facts import Facts
from fednorm.doctor.findings import Gradient, Recommendation

# Plain averaging may lose this much more of a layer's variance than it would of clients alike.
MOST_BIAS = 0.01
# The gradient of `naive` may deviate by this much more than it would for clients alike.
MOST_DEVIATION = 0.05
# Personal layers are advised where at least this share of the clients takes part in a round.
LEAST_SHARE = 0.5
# `dualbn` sends more than `fbn`: it must be closer to one machine by this much to be worth it.
LEAST_GAIN = 0.05

THRESHOLDS = {
    "most_bias": MOST_BIAS,
    "most_deviation": MOST_DEVIATION,
    "least_share": LEAST_SHARE,
    "least_gain": LEAST_GAIN,
}

Rule: TypeAlias = Callable[[Facts], Recommendation | None]


def _advice(strategy: str | None, *reasons: str) -> Recommendation:
    return Recommendation(strategy, tuple(r for r in reasons if r), THRESHOLDS)


def nothing_to_do(facts: Facts) -> Recommendation | None:
    """Without BatchNorm there is nothing to choose."""
    return None if facts.batch_norms else _advice("none", because.no_batch_norm(facts))


def unknown_clients(facts: Facts) -> Recommendation | None:
    """Without data, nothing is said."""
    return None if facts.clients else _advice(None, because.no_data(facts))


def naive_suffices(facts: Facts) -> Recommendation | None:
    """`naive`, where clients differ no more than by chance."""
    if facts.cost("naive") is None or _single(facts) or harm(facts) is not False:
        return None
    limits = because.naive(facts, MOST_BIAS, MOST_DEVIATION)
    return _advice("naive", *limits, because.price(facts, "naive"))


def personal_layers(facts: Facts) -> Recommendation | None:
    """`fedbn`, where each client is tested on its own data and often takes part."""
    taking_part, trained = facts.taking_part
    tested = facts.experiment.evaluate == "clients"
    if not tested or taking_part / trained < LEAST_SHARE or _single(facts):
        return None
    if facts.cost("fedbn") is None:
        return None
    return _advice(
        "fedbn",
        *because.naive(facts, MOST_BIAS, MOST_DEVIATION),
        because.personal(facts, LEAST_SHARE),
        because.price(facts, "fedbn"),
    )


def shared_statistics(facts: Facts) -> Recommendation | None:
    """`fbn` or `dualbn`, where shared statistics bring the gradient closer to one machine's."""
    naive = because.deviation(facts, "naive", "batch")
    found = {g.strategy: g for g in _surveyed(facts)}
    if not found:
        return None
    best = min(found.values(), key=lambda g: g.deviation or 0.0)
    if naive is not None and (best.deviation or 0.0) >= naive:
        return None
    if best.strategy == "dualbn" and "fbn" in found:
        gain = (found["fbn"].deviation or 0.0) - (best.deviation or 0.0)
        best = best if gain >= LEAST_GAIN else found["fbn"]
    return _advice(
        best.strategy,
        *because.naive(facts, MOST_BIAS, MOST_DEVIATION),
        because.closer(facts, LEAST_GAIN),
        because.standing(facts) if best.strategy == "dualbn" else "",
        because.price(facts, best.strategy),
        because.exact(facts),
    )


def no_shared_batches(facts: Facts) -> Recommendation | None:
    """What needs no batch statistics, where there are batches of one and nothing was measured."""
    for name in ("fbn", "gn", "ln", "none"):
        if _single(facts) and facts.cost(name) is not None:
            return _advice(name, because.single(facts), because.price(facts, name))
    return None


def frozen_or_none(facts: Facts) -> Recommendation | None:
    """`fixbn`, whose second half normalises with frozen statistics; else without any."""
    for name in ("fixbn", "gn", "ln", "none"):
        if facts.cost(name) is not None:
            naive = because.naive(facts, MOST_BIAS, MOST_DEVIATION)
            return _advice(name, *naive, because.not_closer(facts), because.price(facts, name))
    return None


RULES: tuple[Rule, ...] = (
    nothing_to_do,
    unknown_clients,
    naive_suffices,
    personal_layers,
    shared_statistics,
    no_shared_batches,
    frozen_or_none,
)


def advise(facts: Facts) -> Recommendation:
    """Return what the first rule that applies says."""
    found = (rule(facts) for rule in RULES)
    return next((advice for advice in found if advice), _advice(None, because.nothing(facts)))


def harm(facts: Facts) -> bool | None:
    """Return whether `naive` exceeds a limit, or None if that was not measured."""
    clients = facts.clients
    gradient = because.gradient(facts, "naive", "batch")
    if clients is None or gradient is None or gradient.excess is None:
        return None
    biases = [layer.excess for layer in clients.layers if layer.excess is not None]
    return gradient.excess >= MOST_DEVIATION or any(bias >= MOST_BIAS for bias in biases)


def _single(facts: Facts) -> bool:
    return bool(facts.clients and facts.clients.left_out)


def _surveyed(facts: Facts) -> list[Gradient]:
    found = [because.gradient(facts, name, "surveyed") for name in ("fbn", "dualbn")]
    return [g for g in found if g and g.deviation is not None and facts.cost(g.strategy)]
