"""What one round of every strategy costs a client, measured by running it on random data.

The clients of all measurements have batches that are drawn once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fednorm.core.messages import Batches
from fednorm.core.random_streams import Stream
from fednorm.core.round import broadcast
from fednorm.core.task import Task
from fednorm.core.types import ClientId, nbytes
from fednorm.data.dataset import Dataset
from fednorm.data.federation import Federation
from fednorm.data.sampling import Plan
from fednorm.doctor.findings import Cost
from fednorm.engines.base import ClientSource, RoundResult
from fednorm.engines.evaluation import calibrate_clients, is_personal
from fednorm.engines.loop import rounds
from fednorm.errors import FednormError
from fednorm.experiment.schema.config import Experiment

Batch: TypeAlias = tuple[Tensor, Tensor]

# Exceptions by which a strategy refuses a model.
REFUSALS = (FednormError, ValueError, TypeError, RuntimeError, IndexError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class ExaminedModel:
    """A model and the setting in which it is examined."""

    model: nn.Module
    experiment: Experiment
    named: bool = True  # whether the experiment names the model


@dataclass(frozen=True, slots=True)
class FixedBatches(ClientSource):
    """Clients with the same batches in every round."""

    steps: Mapping[ClientId, Sequence[Batch]]

    def all(self) -> list[ClientId]:
        """Return every client."""
        return list(self.steps)

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return a client's batches."""
        own = self.steps[client]
        return Batches(client, own, sum(len(y) for _, y in own))

    def all_batches(self, client: ClientId) -> Batches:
        """Return a client's batches."""
        return self.batches(client, 0)

    def split_steps(self) -> list["FixedBatches"]:
        """Return the clients with their first batch only, with their second only, and so on."""
        count = len(next(iter(self.steps.values())))
        return [
            FixedBatches({client: [own[step]] for client, own in self.steps.items()})
            for step in range(count)
        ]


def draw_random(data: Dataset, seed: int, clients: int = 2) -> FixedBatches:
    """Return clients with one batch of two random samples each, shaped as those of the data."""
    generator = torch.Generator().manual_seed(seed + Stream.DOCTOR_BATCHES)

    def batch() -> Batch:
        x = torch.randn(2, *data.shape, generator=generator)
        y = torch.randint(data.classes, (2, *data.y.shape[1:]), generator=generator)
        return x.to(data.transform.device, data.transform.dtype), y.to(data.transform.device)

    return FixedBatches({client: [batch()] for client in range(clients)})


def draw(federation: Federation, count: int) -> FixedBatches:
    """Return the clients of a federation with `count` batches each, as in its first round."""
    longer = replace(federation, plan=Plan(federation.plan.batch, steps=count))
    return FixedBatches({c: list(longer.batches(c, 1).steps) for c in federation.all()})


def deal_again(clients: FixedBatches, seed: int) -> FixedBatches:
    """Deal the same samples to the same clients at random; batches keep their sizes.

    The remaining differences between clients are due to small batches.
    """
    dealt = [batch for own in clients.steps.values() for batch in own]
    x, y = torch.cat([x for x, _ in dealt]), torch.cat([y for _, y in dealt])
    order = torch.randperm(
        len(y), generator=torch.Generator().manual_seed(seed + Stream.DOCTOR_BATCHES)
    ).to(y.device)
    batches = iter(torch.split(order, [len(y) for _, y in dealt]))
    return FixedBatches(
        {
            client: [(x[picked], y[picked]) for _, picked in zip(own, batches, strict=False)]
            for client, own in clients.steps.items()
        }
    )


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
        calibration_bytes_up=asked.bytes_up if asked else None,
        calibration_bytes_down=asked.bytes_down if asked else None,
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
