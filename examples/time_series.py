"""Time series: one-dimensional convolutions with BatchNorm1d.

Each client has a sensor with its own offset and gain, and all are asked which wave they see. Run
it with `python examples/time_series.py`.
"""

import numpy as np
import torch
from torch import nn

import fednorm

SENSORS, LENGTH, WAVES = 6, 48, 4


def record(sensor: int, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Record waves of several frequencies with one sensor: [samples, channels, time]."""
    wave = rng.integers(0, WAVES, samples)
    phase = rng.uniform(0, 2 * np.pi, (samples, 1))
    signal = np.sin(2 * np.pi * (wave[:, None] + 2) * np.arange(LENGTH) / LENGTH + phase)
    noise = 0.3 * rng.normal(size=signal.shape)
    seen = (1 + sensor) * (signal + noise) + sensor
    return seen[:, None].astype(np.float32), wave


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    torch.manual_seed(0)  # the model's initial weights
    clients = [(record(i, 60 + 20 * i, rng), record(i, 40, rng)) for i in range(SENSORS)]
    model = nn.Sequential(
        nn.Conv1d(1, 16, 7, padding=3),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(16, 16, 7, padding=3),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, WAVES),
    )
    result = fednorm.compare(
        ["naive", "fbn", "fedbn"],
        data=clients,
        model=model,
        algorithm={"name": "fedavg", "lr": 0.05},
        local_steps=2,
        rounds=30,
        seeds=1,
        participation=0.67,
        evaluate="clients",
    )
    for run in result.runs:
        print(f"{run.strategy:12} accuracy {run.final.accuracy:.1%}")
