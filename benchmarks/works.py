"""The works that simulators are timed on: the same images, model and steps for everyone.

| work | model | clients | steps |
|---|---|---|---|
| A | FBN's CNN on 32×32×3 | 10, batches of 50 | 1 |
| B | ResNet-20 on 32×32×3 | 5, batches of 20 | 20, momentum 0.9 |
| C | small CNN on 28×28×1 | 100 of 1000, batches of 10 | 5 |
| D | MLP on 8×8 digits, as in the demonstration | 10, batches of 20 | 1, momentum 0.9 |
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """One line of the table above."""

    name: str
    model: str
    shape: tuple[int, ...]
    clients: int
    sampled: int
    batch: int
    steps: int
    momentum: float = 0.0
    held: int = 60  # images that a client holds
    lr: float = 1e-4  # labels are random: nothing is to be learnt, and nothing may diverge

    @property
    def images(self) -> int:
        """Images in all."""
        return self.clients * self.held


WORKS = {
    "A": Work("A", "fbn_cnn", (3, 32, 32), 10, 10, 50, 1, held=500),
    "B": Work("B", "resnet20", (3, 32, 32), 5, 5, 20, 20, momentum=0.9, held=500),
    "C": Work("C", "cnn", (1, 28, 28), 1000, 100, 10, 5),
    "D": Work("D", "mlp", (1, 8, 8), 10, 10, 20, 1, momentum=0.9, held=140),
}


def tensors(work: Work) -> tuple[Tensor, Tensor]:
    """Return images as bytes and their labels; client i holds the i-th `held` of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (work.images, *work.shape), dtype=torch.uint8, generator=generator)
    return x, torch.randint(10, (work.images,), generator=generator)


def network(work: Work) -> nn.Module:
    """Return the model of a work, in plain torch."""
    if work.model != "cnn":
        from fednorm.models import create_model  # noqa: PLC0415 (peers have their small models)

        return create_model(work.model, work.shape, 10, seed=0)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def as_floats(x: Tensor) -> Tensor:
    """Return bytes as a model wants them."""
    return (x.float() / 255 - 0.5) / 0.25
