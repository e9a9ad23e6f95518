"""Accuracy and loss of the global model or, if there is none, of every client's model."""

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
from fednorm.engines.evaluation_statistics import adapt_statistics

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy (of segmentation: mean IoU) and mean loss on `examples` test samples."""

    accuracy: float
    loss: float
    examples: int


class TestSource(Protocol):
    """Where each client's test samples and own data come from."""

    def test(self, client: ClientId) -> Iterable[Batch]:
        """Return the test samples of `client`, in batches."""
        ...

    def all_batches(self, client: ClientId) -> Batches:
        """Return all training data of `client` once, in batches."""
        ...


def is_personal(task: Task) -> bool:
    """Return whether clients keep BatchNorm layers, so that there is no global model."""
    kind = find_kinds(task.model)
    return any(kind[key] in (Kind.AFFINE, Kind.STATISTIC) for key in task.layout.personal)


@torch.no_grad()
def score(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Score | None:
    """Test a model in evaluation mode; return None if there are no batches."""
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
    """Test the models of `clients` on their test samples in `data`, if they have any.

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


class Accuracy:
    """The share of samples whose highest score is that of their label."""

    def __init__(self) -> None:
        self.right = self.samples = 0

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch: one score per class, and one label, for each sample."""
        self.right += int((outputs.argmax(1) == labels).sum())
        self.samples += len(labels)

    @property
    def value(self) -> float:
        """The accuracy so far."""
        return self.right / self.samples


class MeanIoU:
    """Intersection over union of predicted and labelled pixels, averaged over classes.

    A pixel with a negative label does not count. A class that is neither predicted nor labelled in
    any image has no union, and is left out of the average.
    """

    def __init__(self) -> None:
        self.confusion: Tensor | None = None  # rows: labels, columns: predictions

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch: one score per class, and one label, for each pixel."""
        classes = outputs.shape[1]
        known = labels >= 0
        pairs = labels[known] * classes + outputs.argmax(1)[known]
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).cpu()
        self.confusion = counts if self.confusion is None else self.confusion + counts

    @property
    def value(self) -> float:
        """The mean over classes so far; 0 if no pixel has a label."""
        if self.confusion is None or not self.confusion.sum():
            return 0.0
        matrix = self.confusion.double()
        both = matrix.diag()
        union = matrix.sum(0) + matrix.sum(1) - both
        seen = union > 0
        return float((both[seen] / union[seen]).mean())
