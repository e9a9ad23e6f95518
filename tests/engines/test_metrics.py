"""Accuracy and mean IoU against sets of pixels."""

import pytest
import torch

from fednorm.engines.evaluation import Accuracy, MeanIoU


def scores(predicted, classes):
    return torch.nn.functional.one_hot(predicted, classes).movedim(-1, 1).double()


def by_sets(predicted, labels, classes):
    ious = []
    places = list(
        enumerate(zip(predicted.flatten().tolist(), labels.flatten().tolist(), strict=True))
    )
    for kind in range(classes):
        said = {place for place, (p, t) in places if t >= 0 and p == kind}
        true = {place for place, (_, t) in places if t == kind}
        if said | true:
            ious.append(len(said & true) / len(said | true))
    return sum(ious) / len(ious)


@pytest.mark.parametrize("seed", range(5))
def test_mean_iou(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randint(0, 3, (4, 5, 6), generator=generator)
    labels = torch.randint(-1, 4, (4, 5, 6), generator=generator)
    labels[labels == -1] = -100
    metric = MeanIoU()
    for start in (0, 1, 3):  # unequal batches
        end = {0: 1, 1: 3, 3: 4}[start]
        metric.add(scores(predicted[start:end], 6), labels[start:end])
    assert metric.value == pytest.approx(by_sets(predicted, labels, 6))


def test_mean_iou_of_perfection_and_of_nothing():
    labels = torch.tensor([[[0, 1], [2, -100]]])
    metric = MeanIoU()
    metric.add(scores(labels.clamp(min=0), 3), labels)
    assert metric.value == 1.0
    nothing = MeanIoU()
    nothing.add(scores(labels.clamp(min=0), 3), torch.full_like(labels, -100))
    assert nothing.value == 0.0


def test_accuracy_over_unequal_batches():
    metric = Accuracy()
    metric.add(scores(torch.tensor([0, 1, 2]), 3), torch.tensor([0, 1, 1]))
    metric.add(scores(torch.tensor([2]), 3), torch.tensor([2]))
    assert metric.value == 0.75
