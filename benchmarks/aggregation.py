"""How fast the robust rules are next to byzfl's, on vectors of 1.3 million float32 values.

Every pass times ours, byzfl on a numpy array and byzfl on a torch tensor, one after the other; the
ratio is that of the faster of byzfl's two to ours. Pre-aggregations are timed with the mean that
follows. A second process, with nothing else in it, tells how much memory ours takes beyond its
input. byzfl's rules alone are loaded, so what it needs for training is not:

    pip install scipy && pip install --no-deps byzfl==0.0.11
    python benchmarks/aggregation.py            # both numbers of clients
    python benchmarks/aggregation.py 10 krum    # some of it
"""

import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial, reduce
from importlib.util import find_spec
from statistics import median
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from fednorm.aggregators import create_aggregator
from fednorm.system import measure_peak

DIMENSION = 1_300_000
BYZANTINE = {10: 3, 100: 20}  # of how many clients
PASSES = 5
SLOW = 3.0  # seconds; what takes longer is timed once

# A rule of ours, and byzfl's classes for it with their arguments; F is f.
F = object()
RULES: dict[str, list[tuple[object, ...]]] = {
    "mean": [("Average",)],
    "median": [("Median",)],
    "trimmed_mean": [("TrMean", F)],
    "mean_around_median": [("Meamed", F)],
    "geometric_median(start=zero, iterations=3, smoothing=0.1)": [("GeometricMedian",)],
    "krum": [("Krum", F)],
    "multi_krum": [("MultiKrum", F)],
    "centered_clipping(start=zero, iterations=1, radius=100)": [("CenteredClipping",)],
    "nnm > mean": [("NNM", F), ("Average",)],
    "bucketing > mean(f=0)": [("Bucketing", 2), ("Average",)],
    "norm_clipping > mean": [("ARC", F), ("Average",)],
    "norm_clipping(radius=100) > mean": [("Clipping", 100.0), ("Average",)],
    "nnm > trimmed_mean": [("NNM", F), ("TrMean", F)],
}


def byzfl() -> SimpleNamespace | None:
    """Return byzfl's rules, or None where it is not installed."""
    spec = find_spec("byzfl")
    if spec is None:
        return None
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    from byzfl.aggregators import aggregators, preaggregators  # noqa: PLC0415 (it may be absent)

    return SimpleNamespace(**(vars(aggregators) | vars(preaggregators)))


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def theirs(peer: SimpleNamespace, text: str, vectors: np.ndarray | torch.Tensor) -> float:
    """Time byzfl on separate vectors: its clipping overwrites them."""
    own = vectors.copy() if isinstance(vectors, np.ndarray) else vectors.clone()
    f = BYZANTINE[len(own)]
    stages = [
        getattr(peer, name)(*(f if a is F else a for a in arguments))
        for name, *arguments in RULES[text]
    ]
    try:
        return seconds(lambda: reduce(lambda values, stage: stage(values), stages, own))
    except (MemoryError, RuntimeError):  # more memory than there is
        return float("inf")


def compare(peer: SimpleNamespace | None, n: int, texts: list[str]) -> None:
    """Print one line for each rule."""
    rows = torch.randn(n, DIMENSION, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(n)
    sides = [] if peer is None else [rows.numpy(), rows]
    once = median(seconds(rows.sum) for _ in range(PASSES))
    print(f"{n:4d} {'(all values read once: nothing can be faster)':58s} {once:9.4f}")
    for text in texts:
        rule = create_aggregator(text, BYZANTINE[n])
        times: list[list[float]] = [[] for _ in range(1 + len(sides))]
        rule(rows, weights)
        for _ in range(PASSES):
            # A copy that was just made, as for byzfl: part of it may be in the cache.
            times[0].append(seconds(partial(rule, rows.clone(), weights)))
            for past, vectors in zip(times[1:], sides, strict=True):
                slow = past and past[0] > SLOW
                past.append(past[0] if slow else theirs(peer, text, vectors))
        report(n, text, times)


def report(n: int, text: str, times: list[list[float]]) -> None:
    """Print the median seconds of each side, and the median of the ratios."""
    columns = " ".join(f"{median(side):9.4f}" for side in times)
    ratio = ""
    if len(times) > 1:
        own, *others = times
        ratio = f"{median(min(a) / o for o, *a in zip(own, *others, strict=True)):9.1f}"
    print(f"{n:4d} {text:58s} {columns} {ratio}", flush=True)


def memory(n: int, texts: list[str]) -> None:
    """Print what each rule takes at its peak beyond its input, in shares of the input."""
    rows = torch.randn(n, DIMENSION)
    create_aggregator("nnm > median", 1)(
        rows[:, :100_000], torch.ones(n)
    )  # what libraries load at first use
    for text in texts:
        with measure_peak() as most:
            create_aggregator(text, BYZANTINE[n])(rows, torch.ones(n))
        share = "unknown" if most.bytes is None else f"{most.bytes / rows.nbytes:.2f}"
        print(f"{n:4d} {text:58s} {share:>9s}", flush=True)


def main(arguments: list[str]) -> None:
    """Print both tables."""
    numbers = [int(a) for a in arguments if a.isdigit()] or list(BYZANTINE)
    names = [a for a in arguments if not a.isdigit() and a != "--memory"]
    texts = [text for text in RULES if not names or any(name in text for name in names)]
    if "--memory" in arguments:
        for n in numbers:
            memory(n, texts)
        return
    peer = byzfl()
    if peer is None:
        print("byzfl is not installed, so ours is timed alone; see the head of this file.")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    versions["byzfl"] = "none" if peer is None else importlib.metadata.version("byzfl")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{DIMENSION} float32 values a vector, {torch.get_num_threads()} threads\n")
    print(f"   n {'rule':58s}    ours s   numpy s   torch s     ratio")
    for n in numbers:
        compare(peer, n, texts)
    print(f"\n   n {'rule':58s} peak beyond the input / input")
    for n in numbers:
        subprocess.run([sys.executable, __file__, "--memory", str(n), *names], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
