"""Checks that warn about a model and its setting, with the numbers behind each warning."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fednorm.doctor.findings import Caution, Examination
from fednorm.report.format import format_number, format_ratio, format_share, list_names

# Clients that take part in fewer rounds than this share are called rarely sampled.
RARE = 0.5

Check: TypeAlias = Callable[[Examination], Caution | None]


def check_no_batch_norm(exam: Examination) -> Caution | None:
    """Warn about a model without BatchNorm: strategies have nothing to change."""
    if exam.batch_norms:
        return None
    refusing = exam.refusing
    return Caution(
        "no_batch_norm",
        f"0 of {len(exam.layers)} normalization layers are BatchNorm: {len(refusing)} of "
        f"{len(exam.costs)} strategies refuse the model ({list_names(refusing)}), and the "
        "others do not change how it normalises; 'none' trains it unchanged.",
        {"layers": len(exam.layers), "refusing": refusing},
    )


def check_server_optimizer(exam: Examination) -> Caution | None:
    """Warn about server optimisers, which must not update statistics."""
    names = exam.state.statistic_tensors
    if not names:
        return None
    return Caution(
        "server_optimizer",
        f"{len(names)} tensors are running statistics: a server optimiser in your own loop must "
        "not update them like weights.",
        {"tensors": len(names), "bytes": exam.state.statistics},
    )


def check_no_running_statistics(exam: Examination) -> Caution | None:
    """Warn about layers that normalise by the batch in evaluation, too."""
    paths = [layer.path for layer in exam.batch_norms if not layer.tracks]
    if not paths:
        return None
    refusing = exam.refusing
    return Caution(
        "no_running_statistics",
        f"{len(paths)} of {len(exam.batch_norms)} BatchNorm layers ({list_names(paths)}) track no "
        "running statistics, so they normalise by the batch in evaluation, too; "
        f"{len(refusing)} strategies refuse the model.",
        {"layers": paths, "refusing": refusing},
    )


def check_tied(exam: Examination) -> Caution | None:
    """Warn about layers that are used in several places of the network."""
    layers = [layer for layer in exam.batch_norms if layer.calls > 1 or layer.paths > 1]
    if not layers:
        return None
    listed = [f"{x.path}: {x.paths} paths, {x.calls} calls" for x in layers]
    return Caution(
        "tied",
        f"{len(layers)} BatchNorm layers are used in several places ({list_names(listed)}); "
        "one set of statistics describes inputs that may differ.",
        {"layers": {x.path: {"paths": x.paths, "calls": x.calls} for x in layers}},
    )


def check_not_reached(exam: Examination) -> Caution | None:
    """Warn about layers that the forward pass does not call."""
    paths = [layer.path for layer in exam.batch_norms if not layer.calls]
    if not paths:
        return None
    return Caution(
        "not_reached",
        f"{len(paths)} of {len(exam.batch_norms)} BatchNorm layers ({list_names(paths)}) are "
        "not called in a forward pass; their statistics do not change.",
        {"layers": paths},
    )


def check_group_counts(exam: Examination) -> Caution | None:
    """Warn about numbers of groups that do not divide a layer's channels."""
    odd: dict[str, dict[str, int]] = {}
    for entry in exam.experiment.strategies:
        groups = getattr(exam.experiment.make_strategy(entry), "groups", None)
        if isinstance(groups, int):
            uneven = {x.path: x.channels for x in exam.batch_norms if x.channels % groups}
            odd |= {f"{entry.name} with {groups} groups": uneven} if uneven else {}
    if not odd:
        return None
    parts = [
        f"{name}: {list_names([f'{path} has {channels}' for path, channels in uneven.items()])}"
        for name, uneven in odd.items()
    ]
    return Caution(
        "group_counts",
        f"GroupNorm groups do not divide the channels ({'; '.join(parts)}); set strategy.groups "
        "to a common divisor, or strategy.fit=true.",
        {"strategies": odd},
    )


def check_batch_of_one(exam: Examination) -> Caution | None:
    """Warn about batches with one value per channel, which has no variance."""
    batch = exam.experiment.batch_size
    single = None if exam.clients is None else exam.clients.left_out
    if not exam.single_valued or not (batch == 1 if single is None else single):
        return None
    needing = [c.strategy for c in exam.costs if c.needs_batch_statistics]
    affected = f"{len(single)} clients ({list_names(single)})" if single else "all clients"
    return Caution(
        "batch_of_one",
        f"with batch_size = {batch}, {affected} would train on a batch of 1 sample, so that "
        f"{len(exam.single_valued)} BatchNorm layers get one value per channel, without variance: "
        f"{len(needing)} strategies refuse such a run ({list_names(needing)}).",
        {
            "batch_size": batch,
            "clients": None if single is None else list(single),
            "refusing": needing,
        },
    )


def check_rarely_sampled(exam: Examination) -> Caution | None:
    """Warn about personal layers, which train only when their client takes part."""
    taking_part, trained = exam.taking_part
    share, rounds = taking_part / trained, exam.experiment.rounds
    personal = [c for c in exam.costs if c.personal_bytes]
    if not personal or share >= RARE:
        return None
    listed = [f"{c.strategy} ({format_number(c.personal_bytes)} B)" for c in personal]
    never = trained * (1 - share) ** rounds
    return Caution(
        "rarely_sampled",
        f"{taking_part} of {trained} clients take part in a round ({format_share(share)}, under "
        f"{format_share(RARE)}): on average, a client trains its personal tensors every "
        f"{format_ratio(1 / share)} rounds, and {format_ratio(never)} clients never do in "
        f"{rounds} rounds; this affects {', '.join(listed)}.",
        {"share": share, "rounds_between": 1 / share, "never": never, "rare": RARE},
    )


def check_needs_rounds(exam: Examination) -> Caution | None:
    """Warn about strategies that depend on the total number of rounds."""
    names = [c.strategy for c in exam.costs if c.needs_rounds]
    if not names:
        return None
    return Caution(
        "needs_rounds",
        f"{list_names(names)} must know the number of rounds in advance "
        f"(rounds = {exam.experiment.rounds} here).",
        {"strategies": names, "rounds": exam.experiment.rounds},
    )


CHECKS: tuple[Check, ...] = (
    check_no_batch_norm,
    check_batch_of_one,
    check_rarely_sampled,
    check_server_optimizer,
    check_needs_rounds,
    check_no_running_statistics,
    check_tied,
    check_not_reached,
    check_group_counts,
)


def find_cautions(exam: Examination) -> Iterator[Caution]:
    """Yield every warning that applies."""
    for check in CHECKS:
        if (caution := check(exam)) is not None:
            yield caution
