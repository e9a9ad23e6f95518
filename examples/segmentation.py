"""Segmentation: a class for every pixel, and mean IoU.

Images show a bright disk on a dark ground; each client's camera has its own brightness. Run it with
`python examples/segmentation.py`.
"""

import numpy as np
import torch
from torch import nn

import fednorm

Pair = tuple[np.ndarray, np.ndarray]
CAMERAS, SIZE, RADIUS = 5, 16, 4
UNKNOWN, UNSURE = -1, 0.3  # pixels at the edge do not count


def photograph(
    camera: int, samples: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return images [samples, 1, height, width] and masks [samples, height, width]."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    center = rng.uniform(RADIUS, SIZE - RADIUS, (2, samples, 1, 1))
    distance = np.hypot(rows - center[0], columns - center[1])
    masks = (distance < RADIUS).astype(np.int64)
    images = masks + 0.5 * rng.normal(size=masks.shape)
    masks[abs(distance - RADIUS) < UNSURE] = UNKNOWN
    return ((1 + camera) * images + 2 * camera)[:, None].astype(np.float32), masks


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    torch.manual_seed(0)  # the model's initial weights
    clients = [(photograph(i, 40, rng), photograph(i, 15, rng)) for i in range(CAMERAS)]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 2, 1),
    )
    result = fednorm.compare(
        ["naive", "fbn", "fedbn"],
        data=clients,
        model=model,
        batch_size=10,
        algorithm={"name": "fedavg", "lr": 0.1},
        local_steps=2,
        rounds=30,
        seeds=1,
    )
    for run in result.runs:
        print(f"{run.strategy:12} {run.metric} {run.final.accuracy:.1%}")
