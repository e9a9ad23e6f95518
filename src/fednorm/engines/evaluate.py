"""Accuracy and loss, honestly: of the global model where there is one, of every client's if not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fednorm.core.algorithm import Loss
from fednorm.core.layout import find_kinds
from fednorm.core.messages import Batches, ClientState, ServerState
from fednorm.core.task import Task, export
from fednorm.core.types import ClientId, Kind
from fednorm.engines.adapt import adapt_statistics
from fednorm.engines.metrics import Accuracy, MeanIoU

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Share of right answers (of segmentation: mean IoU) and mean loss on so many examples."""

    accuracy: float
    loss: float
    examples: int


class TestSource(Protocol):
    """What each client is tested on, and where its own data comes from."""

    def test(self, client: ClientId) -> Iterable[Batch]:
        """Return what a client is tested on, in batches."""
        ...

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's training data once, in batches."""
        ...


def is_personal(task: Task) -> bool:
    """Return whether BatchNorm layers are the clients' own, so that there is no global model."""
    kind = find_kinds(task.model)
    return any(kind[key] in (Kind.AFFINE, Kind.STATISTIC) for key in task.layout.personal)


@torch.no_grad()
def score(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Score | None:
    """Test a model in evaluation mode; None if there is nothing to test it on."""
    total, examples, tally = 0.0, 0, None
    for inputs, labels in batches:
        outputs = model(inputs)
        tally = tally or (MeanIoU() if labels.dim() > 1 else Accuracy())
        tally.add(outputs, labels)
        total += float(loss(outputs, labels)) * len(labels)
        examples += len(labels)
    return Score(tally.value, total / examples, examples) if tally else None


def score_global(task: Task, state: ServerState, batches: Iterable[Batch]) -> Score:
    """Test the global model."""
    result = score(export(task, state), batches, task.loss)
    if result is None:
        raise ValueError("there are no test samples to evaluate on.")
    return result


def score_clients(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    data: TestSource,
    clients: Iterable[ClientId],
    *,
    adapt: float = 0.0,
) -> dict[ClientId, Score]:
    """Test clients' models on the test samples that `data` gives them, where there are some.

    With `adapt`, each client first re-estimates the statistics on its own data, without labels.
    """
    scores = {}
    for client in clients:
        model = export(task, state, client_states.get(client))
        if adapt:
            adapt_statistics(task, data.all_batches(client), adapt)
        if own := score(model, data.test(client), task.loss):
            scores[client] = own
    return scores
