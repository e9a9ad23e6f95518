"""Warnings about the layers of a model: one function for each."""

from fednorm.doctor.facts import Facts
from fednorm.doctor.findings import Caution
from fednorm.doctor.numbers import count, some


def no_batch_norm(facts: Facts) -> Caution | None:
    """A model that the strategies have nothing to do for."""
    if facts.batch_norms:
        return None
    refusing = facts.refusing
    return Caution(
        "no_batch_norm",
        f"0 of {len(facts.layers)} normalization layers are BatchNorm: {len(refusing)} of "
        f"{len(facts.costs)} strategies refuse the model ({some(refusing)}), and any other "
        "changes nothing in how it normalises; 'none' trains it as it is.",
        {"layers": len(facts.layers), "refusing": refusing},
    )


def server_optimizer(facts: Facts) -> Caution | None:
    """A server optimiser must not step along statistics."""
    names = facts.state.statistic_tensors
    if not names:
        return None
    return Caution(
        "server_optimizer",
        f"{len(names)} tensors ({some(names)}; {count(facts.state.statistics)} B) are running "
        "statistics: a server optimiser that steps along them as if they were weights can make "
        "variances negative. fednorm merges them apart from the weights; a loop of your own must.",
        {"tensors": len(names), "bytes": facts.state.statistics},
    )


def no_running_statistics(facts: Facts) -> Caution | None:
    """Layers that normalise by the batch in evaluation, too."""
    paths = [layer.path for layer in facts.batch_norms if not layer.tracks]
    if not paths:
        return None
    refusing = facts.refusing
    return Caution(
        "no_running_statistics",
        f"{len(paths)} of {len(facts.batch_norms)} BatchNorm layers ({some(paths)}) track no "
        "running statistics, so they normalise by the batch in evaluation, too; "
        f"{len(refusing)} strategies refuse the model.",
        {"layers": paths, "refusing": refusing},
    )


def tied(facts: Facts) -> Caution | None:
    """Layers whose statistics mix several places of the network."""
    layers = [layer for layer in facts.batch_norms if layer.calls > 1 or layer.paths > 1]
    if not layers:
        return None
    listed = [f"{x.path}: {x.paths} paths, {x.calls} calls" for x in layers]
    return Caution(
        "tied",
        f"{len(layers)} BatchNorm layers are used in several places ({some(listed)}); one set of "
        "statistics stands for inputs that may differ.",
        {"layers": {x.path: {"paths": x.paths, "calls": x.calls} for x in layers}},
    )


def not_reached(facts: Facts) -> Caution | None:
    """Layers that no batch comes by."""
    paths = [layer.path for layer in facts.batch_norms if not layer.calls]
    if not paths:
        return None
    return Caution(
        "not_reached",
        f"{len(paths)} of {len(facts.batch_norms)} BatchNorm layers ({some(paths)}) do not run in "
        "a forward pass; their statistics stay as they are.",
        {"layers": paths},
    )


def group_counts(facts: Facts) -> Caution | None:
    """GroupNorm needs a number of groups that divides the channels."""
    odd: dict[str, dict[str, int]] = {}
    for entry in facts.experiment.strategies:
        groups = getattr(facts.experiment.make_strategy(entry), "groups", None)
        if isinstance(groups, int):
            uneven = {x.path: x.channels for x in facts.batch_norms if x.channels % groups}
            odd |= {f"{entry.name} with {groups} groups": uneven} if uneven else {}
    if not odd:
        return None
    parts = [
        f"{name}: {some([f'{path} has {channels}' for path, channels in uneven.items()])}"
        for name, uneven in odd.items()
    ]
    return Caution(
        "group_counts",
        f"GroupNorm groups do not divide the channels ({'; '.join(parts)}); set strategy.groups "
        "to a common divisor, or strategy.fit=true.",
        {"strategies": odd},
    )
