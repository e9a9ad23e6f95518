"""Tabular regression: targets are floats, so the loss is the squared error and the figure R².

Five hospitals measure the same quantity, each in other circumstances. Run it with
`python examples/tabular_regression.py`.
"""

import numpy as np
import torch
from torch import Tensor, nn

import fednorm

Pair = tuple[np.ndarray, np.ndarray]


def measure(hospital: int, samples: int, rng: np.random.Generator) -> Pair:
    """Draw patients of one hospital: its features are shifted and scaled."""
    features = rng.normal(size=(samples, 8))
    risk = np.sin(features[:, 0]) + 0.5 * features[:, 1] * features[:, 2]
    seen = features * (1 + 0.3 * hospital) + hospital
    return seen.astype(np.float32), risk.astype(np.float32)


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error on the whole test set."""
    return (outputs - targets).abs().mean()


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    torch.manual_seed(0)  # the model's initial weights
    sizes = [200, 150, 100, 80, 60]  # one (train, test) pair per client
    clients = [(measure(i, size, rng), measure(i, 50, rng)) for i, size in enumerate(sizes)]
    model = nn.Sequential(
        nn.BatchNorm1d(8), nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)
    )
    result = fednorm.compare(
        ["naive", "fbn", "fedbn"],
        data=clients,
        model=model,
        algorithm={"name": "fedavg", "lr": 0.05},
        local_epochs=1,
        rounds=40,
        seeds=1,
        loss=nn.HuberLoss(),
        metrics={"MAE": mean_absolute_error},
        evaluate="clients",
    )
    for run in result.runs:
        print(f"{run.strategy:12} R² {run.final.accuracy:.1%}  MAE {run.final.metrics['MAE']:.3f}")
