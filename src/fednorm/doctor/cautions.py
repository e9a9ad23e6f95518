"""What a person would want to be warned of: one function for each, and the numbers it rests on."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fednorm.doctor import layer_cautions as of_layers
from fednorm.doctor.facts import Facts
from fednorm.doctor.findings import Caution
from fednorm.doctor.numbers import count, number, percent, some

# Clients that take part in fewer rounds than this share are called rarely sampled.
RARE = 0.5

Check: TypeAlias = Callable[[Facts], Caution | None]


def batch_of_one(facts: Facts) -> Caution | None:
    """BatchNorm cannot take the variance of one value."""
    batch = facts.experiment.batch
    single = None if facts.clients is None else facts.clients.left_out
    if not facts.single_valued or not (batch == 1 if single is None else single):
        return None
    needing = [c.strategy for c in facts.costs if c.needs_batch_statistics]
    who = f"{len(single)} clients ({some(single)})" if single else "all clients"
    return Caution(
        "batch_of_one",
        f"with batch = {batch}, {who} would train on a batch of 1 sample, of which "
        f"{len(facts.single_valued)} BatchNorm layers get one value per channel, without variance: "
        f"{len(needing)} strategies refuse such a run ({some(needing)}).",
        {"batch": batch, "clients": None if single is None else list(single), "refusing": needing},
    )


def rarely_sampled(facts: Facts) -> Caution | None:
    """Personal layers learn only when their client takes part."""
    taking_part, trained = facts.taking_part
    share, rounds = taking_part / trained, facts.experiment.rounds
    personal = [c for c in facts.costs if c.personal_bytes]
    if not personal or share >= RARE:
        return None
    listed = [f"{c.strategy} ({count(c.personal_bytes)} B)" for c in personal]
    never = trained * (1 - share) ** rounds
    return Caution(
        "rarely_sampled",
        f"{taking_part} of {trained} clients take part in a round ({percent(share)}, under "
        f"{percent(RARE)}): a client trains its personal tensors every {number(1 / share)} rounds "
        f"in the mean, and after {rounds} rounds {number(never)} clients never did; "
        f"this concerns {', '.join(listed)}.",
        {"share": share, "rounds_between": 1 / share, "never": never, "rare": RARE},
    )


def needs_rounds(facts: Facts) -> Caution | None:
    """Some strategies change at a share of all rounds."""
    names = [c.strategy for c in facts.costs if c.needs_rounds]
    if not names:
        return None
    return Caution(
        "needs_rounds",
        f"{some(names)} must know the number of rounds before the first one "
        f"(rounds = {facts.experiment.rounds} here).",
        {"strategies": names, "rounds": facts.experiment.rounds},
    )


CHECKS: tuple[Check, ...] = (
    of_layers.no_batch_norm,
    batch_of_one,
    rarely_sampled,
    of_layers.server_optimizer,
    needs_rounds,
    of_layers.no_running_statistics,
    of_layers.tied,
    of_layers.not_reached,
    of_layers.group_counts,
)


def cautions(facts: Facts) -> Iterator[Caution]:
    """Yield every warning that applies."""
    for check in CHECKS:
        if (caution := check(facts)) is not None:
            yield caution
