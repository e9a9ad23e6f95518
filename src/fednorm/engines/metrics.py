"""What is measured on test samples, added up batch by batch."""

import torch
from torch import Tensor


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
