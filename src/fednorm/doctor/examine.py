"""Examines a model: its layers and every strategy on random data, and the clients on theirs."""

from typing import Any

from torch import nn

from fednorm.core.registry import UnknownNameError
from fednorm.data import Dataset
from fednorm.doctor.cautions import cautions
from fednorm.doctor.costs import REFUSALS, Patient, costs, reason
from fednorm.doctor.facts import Facts
from fednorm.doctor.findings import Layer, Model, State
from fednorm.doctor.fixed_batches import random_clients
from fednorm.doctor.layers import layers, state
from fednorm.doctor.measure import measure
from fednorm.doctor.recommend import advise
from fednorm.doctor.report import Report
from fednorm.doctor.subject import is_source, network, samples
from fednorm.experiment.config import Experiment
from fednorm.experiment.environment import threads
from fednorm.experiment.load import ConfigError, build
from fednorm.experiment.prepare import ModelSource
from fednorm.strategies import STRATEGIES

SCHEMA = 1


def examine(
    model: str | dict[str, Any] | ModelSource,
    *,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    batches: int = 4,
    seed: int = 0,
    **settings: Any,
) -> Report:
    """Say in numbers what will happen to a model in federated learning.

    Args:
        model: a name, "package.module:function", an `nn.Module`, or a function that returns one.
        shape: of one sample, if there is no data; otherwise that of the default data set.
        classes: how many, if there is no data.
        batches: of each client, on which the clients are measured.
        seed: of data, partition, initial weights and random samples.
        settings: any key of the schema. With `data` or `partition`, the clients are measured.

    >>> report = examine("mlp", shape=(4,), classes=3)
    >>> [layer.place for layer in report.layers], report.recommendation.strategy
    (['activation', 'activation'], None)
    """
    experiment = _experiment({"seeds": [seed], **settings}, None if is_source(model) else model)
    measured = "data" in settings or "partition" in settings
    if measured and (shape or classes):
        raise ConfigError("shape and classes come from the data; give either these or the data.")
    if batches < 1:
        raise ConfigError(f"batches must be at least 1, not {batches}.")
    try:
        data = samples(experiment, shape, classes)
        patient = Patient(network(experiment, data, model), experiment, not is_source(model))
        size = state(patient.model)
    except UnknownNameError:
        raise
    except (*REFUSALS, AssertionError) as error:  # torch asserts that a device can be used
        raise ConfigError(reason(error)) from error
    with threads(experiment.threads):
        return _report(patient, data, size, batches if measured else None)


def _experiment(settings: dict[str, Any], model: Any) -> Experiment:
    if "strategies" in settings:
        raise ConfigError("every strategy is examined; leave 'strategies' out.")
    values = {**settings, "strategies": list(STRATEGIES)}
    return build(values if model is None else {**values, "model": model})


def _report(patient: Patient, data: Dataset, size: State, batches: int | None) -> Report:
    model, experiment = patient.model, patient.experiment
    found = _layers(model, data)
    clients = random_clients(data, experiment.seeds[0])
    single = any(layer.batch_norm and layer.values == 1 for layer in found)
    samples = 2 if single else 1  # one value has no variance
    facts = Facts(
        experiment=experiment,
        layers=found,
        state=size,
        costs=costs(patient, clients),
        clients=None if batches is None else measure(patient, data, batches, samples=samples),
    )
    return Report(
        schema=SCHEMA,
        model=_described(patient, data),
        layers=found,
        state=size,
        strategies=tuple(facts.costs),
        warnings=tuple(cautions(facts)),
        clients=facts.clients,
        recommendation=advise(facts),
    )


def _layers(model: nn.Module, data: Dataset) -> tuple[Layer, ...]:
    try:
        return layers(model, data.look.plain(data.x[:2], data.y[:2])[0])
    except REFUSALS as error:
        raise ConfigError(
            f"the model cannot be run on samples of shape {data.shape}: {reason(error)} "
            "Give the shape of a sample (--shape 3,32,32) or other data."
        ) from error


def _described(patient: Patient, data: Dataset) -> Model:
    model, experiment = patient.model, patient.experiment
    return Model(
        name=experiment.model.name if patient.named else type(model).__name__,
        type=type(model).__name__,
        shape=data.shape,
        classes=data.classes,
        dtype=experiment.dtype,
        parameters=sum(p.numel() for p in model.parameters()),
        algorithm=experiment.algorithm.model_dump(),
        batch=experiment.batch,
        participation=experiment.participation,
        rounds=experiment.rounds,
        seed=experiment.seeds[0],
    )
