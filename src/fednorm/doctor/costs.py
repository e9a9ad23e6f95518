"""What one round of every strategy costs a client, measured by running it on random data."""

from dataclasses import dataclass, replace

from torch import nn

from fednorm.core.round import broadcast
from fednorm.core.task import Task
from fednorm.core.types import nbytes
from fednorm.doctor.findings import Cost
from fednorm.doctor.fixed_batches import FixedBatches
from fednorm.engines.base import RoundResult
from fednorm.engines.evaluation import calibrate_clients, is_personal
from fednorm.engines.loop import rounds
from fednorm.errors import FednormError
from fednorm.experiment.config import Experiment

# Exceptions by which a strategy refuses a model.
REFUSALS = (FednormError, ValueError, TypeError, RuntimeError, IndexError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class ExaminedModel:
    """A model and the setting in which it is examined."""

    model: nn.Module
    experiment: Experiment
    named: bool = True  # whether the experiment names the model


def describe_error(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def build_task(examined: ExaminedModel, name: str) -> Task:
    """Build the task of a run of the experiment with the named strategy."""
    experiment = examined.experiment
    (entry,) = (e for e in experiment.strategies if e.name == name)
    strategy = experiment.make_strategy(entry)
    algorithm = experiment.make_algorithm(strategy)
    return Task.build(examined.model, strategy, algorithm, rounds=experiment.rounds)


def measure_costs(examined: ExaminedModel, clients: FixedBatches) -> tuple[Cost, ...]:
    """Return the cost of every strategy of the experiment."""
    return tuple(
        _measure_cost(examined, entry.name, clients) for entry in examined.experiment.strategies
    )


def _measure_cost(examined: ExaminedModel, name: str, clients: FixedBatches) -> Cost:
    try:
        task = build_task(examined, name)
        (result,) = rounds(task, clients, 1)
        return _read_cost(name, task, result, clients)
    except REFUSALS as error:
        return Cost(name, refused=describe_error(error))


def _read_cost(name: str, task: Task, result: RoundResult, clients: FixedBatches) -> Cost:
    asked = None
    if task.strategy.calibration == "evaluation":
        asked = calibrate_clients(task, result.state, result.client_states, clients, clients.all())[
            1
        ]
    kept = result.client_states[clients.all()[0]]
    return Cost(
        strategy=name,
        exchanges=result.exchanges,
        bytes_up=result.bytes_up,
        bytes_down=result.bytes_down,
        measures=task.strategy.measures,
        survey_bytes_up=asked.bytes_up if asked else None,
        survey_bytes_down=asked.bytes_down if asked else None,
        personal_bytes=nbytes(kept.tensors.values()),
        momentum_bytes=nbytes(kept.optimizer.values()),
        global_model=not is_personal(task),
        needs_rounds=_needs_rounds(task),
        needs_batch_statistics=task.strategy.needs_batch_statistics,
    )


def _needs_rounds(task: Task) -> bool:
    """Return whether the strategy must know the number of rounds in advance."""
    try:
        task.strategy.rule(broadcast(replace(task, rounds=None), task.initial_state))
    except ValueError:
        return True
    return False
