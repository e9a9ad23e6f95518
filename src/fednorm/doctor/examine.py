"""Examine a model, its clients and its setting, and warn with the numbers behind each warning."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from fednorm.data import Dataset
from fednorm.doctor.client_shift import measure_clients
from fednorm.doctor.costs import REFUSALS, ExaminedModel, describe_error, draw_random, measure_costs
from fednorm.doctor.findings import (
    Budget,
    Caution,
    DoctorReport,
    Examination,
    Layer,
    ModelSummary,
    State,
)
from fednorm.doctor.layers import find_layers, measure_state
from fednorm.doctor.race import race
from fednorm.doctor.recommend import recommend, write_commands
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.build import load_data, make_model
from fednorm.experiment.callbacks.base import UNWATCHED, Monitor
from fednorm.experiment.objective import ModelSource
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from fednorm.nn.copies import copy_model
from fednorm.report.format import format_number, format_ratio, format_share, list_names
from fednorm.strategies import STRATEGIES
from fednorm.system import limit_threads

SCHEMA = 2
CLASSES = 10  # where only the shape of a sample is given
RARE = 0.5  # share of the rounds; clients in fewer are called rarely sampled

Check: TypeAlias = Callable[[Examination], Caution | None]


def examine(  # noqa: PLR0913 (each is one choice)
    model: str | dict[str, Any] | ModelSource,
    *,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    batches: int = 4,
    seed: int = 0,
    budget: float | Budget = 60.0,
    monitor: Monitor = UNWATCHED,
    **settings: Any,
) -> DoctorReport:
    """Examine how a model will behave in federated learning.

    Args:
        model: a name, "package.module:function", an `nn.Module`, or a function that returns one.
        shape: shape of a sample, without data; by default that of the default data set.
        classes: number of classes, without data.
        batches: batches of each client that are measured.
        seed: seed of data, partition, initial weights and random samples.
        budget: seconds for a race of candidate strategies, or a `Budget`; 0 for no race.
        monitor: follows the runs of the race, and can stop it.
        settings: any key of the schema. With `data` or `partition`, the clients are measured and
            candidates raced.

    >>> report = examine("mlp", shape=(4,), classes=3)
    >>> [layer.place for layer in report.layers], report.recommendation.strategy
    (['activation', 'activation'], None)
    """
    source = model if isinstance(model, nn.Module) or callable(model) else None
    named = model if source is None else None
    experiment = _build_experiment({"seeds": [seed], **settings}, named)
    measured = "data" in settings or "partition" in settings
    if measured and (shape or classes):
        raise ConfigError("shape and classes come from the data; give either these or the data.")
    if batches < 1:
        raise ConfigError(f"batches must be at least 1, not {batches}.")
    try:
        data = load_samples(experiment, shape, classes)
        network = build_network(experiment, data, source)
        examined = ExaminedModel(network, experiment, named=source is None)
        state = measure_state(network)
    except UnknownNameError:
        raise
    except (*REFUSALS, AssertionError) as error:  # torch asserts that a device can be used
        raise ConfigError(describe_error(error)) from error
    with limit_threads(experiment.threads):
        exam = _examine(examined, data, state, batches if measured else None)
        limit = budget if isinstance(budget, Budget) else Budget(budget)
        if measured and exam.batch_norms and limit != Budget(0):
            exam = replace(exam, race=race(examined, limit, monitor))
    advice = recommend(exam)
    commands = write_commands(advice, experiment, named=examined.named)
    return DoctorReport(
        schema=SCHEMA,
        model=_describe_model(examined, data),
        layers=tuple(exam.layers),
        state=state,
        strategies=tuple(exam.costs),
        warnings=tuple(find_cautions(exam)),
        clients=exam.clients,
        race=exam.race,
        recommendation=replace(advice, commands=tuple(commands)),
    )


def _build_experiment(settings: dict[str, Any], model: Any) -> Experiment:
    if "strategies" in settings:
        raise ConfigError("every strategy is examined; leave 'strategies' out.")
    values = {**settings, "strategies": list(STRATEGIES)}
    return build_experiment(values if model is None else {**values, "model": model})


def _examine(
    examined: ExaminedModel, data: Dataset, state: State, batches: int | None
) -> Examination:
    model, experiment = examined.model, examined.experiment
    layers = _find_layers(model, data)
    single = any(layer.batch_norm and layer.values == 1 for layer in layers)
    samples = 2 if single else 1  # one value has no variance
    return Examination(
        experiment=experiment,
        layers=layers,
        state=state,
        costs=measure_costs(examined, draw_random(data, experiment.seeds[0])),
        clients=measure_clients(examined, data, batches, samples=samples) if batches else None,
    )


def _find_layers(model: nn.Module, data: Dataset) -> tuple[Layer, ...]:
    try:
        return find_layers(model, data.transform.apply_evaluation(data.x[:2], data.y[:2])[0])
    except REFUSALS as error:
        raise ConfigError(
            f"the model cannot be run on samples of shape {data.shape}: {describe_error(error)} "
            "Give the shape of a sample (--shape 3,32,32) or other data."
        ) from error


def _describe_model(examined: ExaminedModel, data: Dataset) -> ModelSummary:
    model, experiment = examined.model, examined.experiment
    return ModelSummary(
        name=experiment.model.name if examined.named else type(model).__name__,
        type=type(model).__name__,
        shape=data.shape,
        classes=data.classes,
        dtype=experiment.dtype,
        parameters=sum(p.numel() for p in model.parameters()),
        algorithm=experiment.algorithm.model_dump(),
        batch_size=experiment.batch_size,
        participation=experiment.participation,
        rounds=experiment.rounds,
        seed=experiment.seeds[0],
    )


def read_shape(text: str) -> tuple[int, ...]:
    """Read the shape of a sample.

    >>> read_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"a shape is positive whole numbers such as 3,32,32 or 64, but got {text!r}."
        )
    return shape


def read_budget(text: str) -> Budget:
    """Read a time such as 90, 60s, 2m or 1h, or a length in rounds such as 40r.

    >>> read_budget("2m"), read_budget("40r").rounds
    (Budget(seconds=120.0, rounds=None), 40)
    """
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "s")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "r": 1.0}
    if not 0 <= value < math.inf or unit not in units or (unit == "r" and value % 1):
        raise ConfigError(f"a budget is a time such as 60s, 2m or 1h, or 40r, but got {text!r}.")
    return Budget(rounds=int(value)) if unit == "r" and value else Budget(value * units[unit])


def load_samples(
    experiment: Experiment, shape: tuple[int, ...] | None, classes: int | None
) -> Dataset:
    """Return the data, or random samples of the given shape instead."""
    seed = experiment.seeds[0]
    data = load_data(experiment, seed)
    if shape or classes:
        labels = torch.arange(classes or CLASSES)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(labels), *(shape or data.shape), generator=generator)
        data = Dataset("random", x, labels, x, labels, len(labels))
    return data.to(experiment.device, getattr(torch, experiment.dtype))


def build_network(experiment: Experiment, data: Dataset, source: ModelSource | None) -> nn.Module:
    """Return a copy of the model, in the number format and on the device of the data."""
    model = make_model(experiment, data, experiment.seeds[0], source)
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, but got {type(model).__name__}.")
    return copy_model(model).to(data.transform.device, data.transform.dtype)


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
