"""The figures of each kind of targets: against sets of pixels, and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import f1_score, r2_score

from fednorm.core.targets import F1, R2, Accuracy, MeanIoU, Metrics, mean_squared_error


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


def test_accuracy_of_sequences_leaves_out_negative_labels():
    metric = Accuracy()
    metric.add(
        scores(torch.tensor([[0, 1, 2], [1, 1, 0]]), 3), torch.tensor([[0, -100, 1], [1, 1, -1]])
    )
    assert metric.value == 0.75


@pytest.mark.parametrize("outputs", [(), (3,), (2, 2)])
@pytest.mark.parametrize("far", [0.0, 1e6])
def test_r2_over_unequal_batches(outputs, far):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20, *outputs, generator=generator, dtype=torch.float64) + far
    guess = y + 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    metric = R2()
    for part in (slice(0, 1), slice(1, 8), slice(8, 20)):
        metric.add(guess[part], y[part])
    known = r2_score(y.flatten(1) if outputs else y, guess.flatten(1) if outputs else guess)
    assert metric.value == pytest.approx(known, rel=1e-6)


def test_r2_of_equal_targets_is_1_only_if_all_are_right():
    for guess, value in ((2.0, 1.0), (2.5, 0.0)):
        metric = R2()
        metric.add(torch.full((4, 1), guess), torch.full((4,), 2.0))
        assert metric.value == value


def test_f1_over_unequal_batches():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (20, 4), generator=generator).float()
    guess = torch.randn(20, 4, generator=generator)
    metric = F1()
    for part in (slice(0, 1), slice(1, 20)):
        metric.add(guess[part], y[part])
    assert metric.value == pytest.approx(f1_score(y, guess > 0, average="micro"))


def test_outputs_that_fit_no_target_are_an_error():
    assert float(mean_squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 3.0]))) == 0
    for outputs in (torch.zeros(2, 3), torch.zeros(1, 2)):
        with pytest.raises(ValueError, match=r"gives one number for each, but its outputs are"):
            mean_squared_error(outputs, torch.zeros(2))


def test_a_test_does_not_change_the_object_of_the_user():
    class Count:
        count = 7

        def reset(self):
            self.count = 0

        def update(self, outputs, targets):
            del outputs
            self.count += len(targets)

        def compute(self):
            return self.count

    own = Count()
    for _ in range(2):
        _, named = Metrics(named={"count": own}).start(torch.zeros(3))
        named["count"].add(torch.zeros(3), torch.zeros(3))
        assert named["count"].value == 3
    assert own.count == 7
