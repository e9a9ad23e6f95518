"""What privacy costs each normalization, and what statistics tell of a batch.

    python benchmarks/privacy.py                  # accuracy against ε on digits
    python benchmarks/privacy.py fashion_mnist    # the same on Fashion-MNIST
    python benchmarks/privacy.py --batches        # who was in a batch, from its statistics

The first two compare naive, fbn and gn at equal ε of the whole run: for each ε the noise is found
with the accountant. gn sends no statistics and pays for updates alone. The same command continues
what was interrupted (`--out`). The third one asks an attacker who holds 1397 images, and gets the
statistics of a batch of some of them, which images those are. Its first guess is the image whose
own statistics are nearest; its second one are the images of the largest weights of a nonnegative
least-squares fit, because means and mean squares of a batch are means over its samples.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

import fednorm
from fednorm.core.messages import Batches, ClientState
from fednorm.core.round import broadcast, client_round
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment

# By row: the strategy, and the clip of its statistics. naive sends running statistics, which move
# by a third in a round of four batches; fbn sends the moments of the batches.
ROWS = {
    "naive": ("naive", 1.0),
    "naive, 0.3": ("naive", 0.3),
    "fbn": ("fbn", 1.0),
    "gn": ("gn", 1.0),
}
EPSILONS = {"digits": (16.0, 8.0, 4.0, 2.0), "fashion_mnist": (8.0, 4.0, 2.0, 1.0)}
RATIO = 3.0  # noise of statistics to that of updates: they have fewer numbers
COMMON = {
    "partition": "dirichlet=0.5",
    "local_epochs": 2,
    "algorithm": {"name": "fedavg", "lr": 0.1},
    "seeds": [0, 1, 2],
    "engine": "stacked",
}
DATA = {
    "digits": {
        "data": "digits",
        "model": {"name": "mlp", "hidden": [24]},
        "clients": 140,
        "participation": 0.3,
        "batch_size": 5,
        "rounds": 80,
        "eval_every": 80,
    },
    "fashion_mnist": {
        "data": {"name": "fashion_mnist", "train": 10000, "test": 2000},
        "model": {"name": "mlp", "hidden": [32]},
        "clients": 500,
        "participation": 0.1,
        "batch_size": 10,
        "rounds": 40,
        "eval_every": 40,
    },
}
CLIP = 0.6  # of updates
SIZES = (1, 2, 4, 8, 16, 32, 64)


@cache
def find_noise(epsilon: float, private: fednorm.Privacy, rounds: int, *, statistics: bool) -> float:
    """Return the least noise, to one part in a thousand, with which a run has this ε."""
    low, high = 0.05, 200.0
    while high / low > 1.001:  # noqa: PLR2004 (as the docstring says)
        middle = (low * high) ** 0.5
        tried = replace(private, noise=middle, noise_statistics=RATIO * middle)
        found = tried.find_epsilon(rounds, statistics=statistics)
        low, high = (middle, high) if found is None or found > epsilon else (low, middle)
    return round(high, 4)


def list_entries(
    settings: dict[str, object], epsilons: Sequence[float], delta: float
) -> Iterator[dict[str, object]]:
    """Yield every strategy without privacy, with clipping alone, and with each ε."""
    rate, clients, rounds = (settings[k] for k in ("participation", "clients", "rounds"))
    private = fednorm.Privacy(1.0, 1.0, rate * clients, rate=rate, delta=delta)
    for row, (name, bound) in ROWS.items():
        if row == name:
            yield {"name": name, "label": f"{row}, not private"}
        table = {"clip": CLIP, "clip_statistics": bound, "delta": delta}
        yield {"name": name, "label": f"{row}, clipped", "privacy": {**table, "noise": 0.0}}
        for epsilon in epsilons:
            noise = find_noise(epsilon, private, rounds, statistics=name != "gn")
            own = {**table, "noise": noise, "noise_statistics": round(RATIO * noise, 4)}
            yield {"name": name, "label": f"{row}, ε = {epsilon:g}", "privacy": own}


def measure_cost(data: str, out: Path, workers: int) -> None:
    """Run all strategies with all ε, and print accuracies as a table."""
    settings = {**COMMON, **DATA[data]}
    delta = 0.1 / settings["clients"]
    entries = list(list_entries(settings, EPSILONS[data], delta))
    result = fednorm.compare(entries, out=out / data, workers=workers, **settings)
    rows = {row.strategy: row for row in result.summaries()}
    columns = ["not private", "clipped", *(f"ε = {epsilon:g}" for epsilon in EPSILONS[data])]
    print(f"\n{data}, δ = {delta:.2g}; noise of gn and of the others in the last line")
    print(f"| strategy | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in ROWS:
        found = [rows.get(f"{name}, {column}") for column in columns]
        cells = [f"{100 * r.accuracy:.1f} ± {100 * r.spread:.1f}" if r else "" for r in found]
        print(f"| {name} | {' | '.join(cells)} |")
    noises = {e["label"]: e["privacy"]["noise"] for e in entries if "privacy" in e}
    pairs = [f"{noises[f'gn, {c}']:.2f}, {noises[f'fbn, {c}']:.2f}" for c in columns[2:]]
    print(f"| noise | – | 0 | {' | '.join(pairs)} |")


def read_statistics(prepared: PreparedRun, images: Sequence[int]) -> NDArray[np.float64]:
    """Return the means and mean squares that a client reports of a batch of these images."""
    task, data = prepared.task, prepared.federation.data
    x, y = data.training_batch(np.array(images))
    sent = broadcast(task, task.initial_state)
    reply, _ = client_round(task, sent, ClientState(), Batches(0, [(x, y)], len(y)))
    moments = [report.moments for report in reply.stats.values()]
    parts = [part for m in moments for part in (m.mean, m.var + m.mean**2)]
    return torch.cat(parts).double().numpy()


def measure_batches(trials: int = 100) -> None:
    """Print how often images of a batch are found by its statistics."""
    print(f"| model, clients | guess | {' | '.join(map(str, SIZES))} |\n|{'---|' * 9}")
    for model, partition in (("mlp", "iid"), ("mlp", "gamma=0"), ("cnn", "iid")):
        values = {"strategies": ["fbn"], "partition": partition, "model": model, "seeds": [0]}
        experiment = build_experiment(values)
        prepared = prepare(experiment, experiment.strategies[0], 0)
        parts = prepared.federation.parts
        single = [read_statistics(prepared, [i]) for i in range(len(prepared.federation.data.y))]
        unit = np.std(single, axis=0) + 1e-9
        known = np.stack(single) / unit
        weighed = np.vstack([known.T, np.full((1, len(known)), 100.0)])  # weights add up to 1
        nearest, solved = [], []
        for size in SIZES:
            rng = np.random.default_rng(size)
            hits, shares = [], []
            for trial in range(trials):
                chosen = rng.choice(parts[trial % len(parts)], size, replace=False)
                told = read_statistics(prepared, chosen.tolist()) / unit
                hits.append(np.argmin(np.linalg.norm(known - told, axis=1)) in chosen)
                fitted, _ = nnls(weighed, np.append(told, 100.0), maxiter=10_000)
                shares.append(np.isin(np.argsort(-fitted)[:size], chosen).mean())
            nearest.append(f"{100 * np.mean(hits):.0f}")
            solved.append(f"{100 * np.mean(shares):.0f}")
        print(f"| `{model}`, `{partition}` | nearest | {' | '.join(nearest)} |")
        print(f"| | least squares | {' | '.join(solved)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", default="digits", choices=[*DATA])
    parser.add_argument("--batches", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/privacy"))
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if given.batches:
        measure_batches()
    else:
        measure_cost(given.data, given.out, given.workers)
