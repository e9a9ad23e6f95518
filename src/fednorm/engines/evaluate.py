"""Accuracy and loss, honestly: of the global model where there is one, of every client's if not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fednorm.core.algorithm import Loss
from fednorm.core.layout import kinds
from fednorm.core.messages import Batches, Memory, ServerState
from fednorm.core.task import Task, export
from fednorm.core.types import ClientId, Kind
from fednorm.engines.adapt import adapt_statistics

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Score:
    """Share of right answers and mean loss on so many examples."""

    accuracy: float
    loss: float
    examples: int


class Tested(Protocol):
    """Where each client's own data comes from."""

    def test(self, client: ClientId) -> tuple[Tensor, Tensor]:
        """Return a client's own test split."""
        ...

    def everything(self, client: ClientId) -> Batches:
        """Return all of a client's training data once, in batches."""
        ...


def is_personal(task: Task) -> bool:
    """Return whether BatchNorm layers are the clients' own, so that there is no global model."""
    kind = kinds(task.model)
    return any(kind[key] in (Kind.AFFINE, Kind.STATISTIC) for key in task.layout.personal)


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> Score:
    """Test a model in evaluation mode."""
    right = total = 0.0
    for start in range(0, len(y), _BATCH):
        inputs, labels = x[start : start + _BATCH], y[start : start + _BATCH]
        outputs = model(inputs)
        right += float((outputs.argmax(1) == labels).sum())
        total += float(loss(outputs, labels)) * len(labels)
    return Score(right / len(y), total / len(y), len(y))


def score_global(task: Task, state: ServerState, x: Tensor, y: Tensor) -> Score:
    """Test the global model."""
    return score(export(task, state), x, y, task.loss)


def score_clients(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    data: Tested,
    clients: Iterable[ClientId],
    *,
    adapt: float = 0.0,
) -> list[Score]:
    """Test clients' models on the clients' own test splits, where they have one.

    With `adapt`, each client first re-estimates the statistics on its own data, without labels.
    """
    scores = []
    for client in clients:
        x, y = data.test(client)
        if len(y):
            model = export(task, state, memories.get(client))
            if adapt:
                adapt_statistics(task, data.everything(client), adapt)
            scores.append(score(model, x, y, task.loss))
    return scores
