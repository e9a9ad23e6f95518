"""Memory, file descriptors, shared-memory blocks and temporary files of a long run.

`python benchmarks/soak.py --rounds 50000` runs the smallest work that uses everything that could
grow: silobn on 12 clients whose states are on disk, a quarter of them dropping out, three
Byzantine, a robust rule. One line for each sample; at the end, what a round has cost on average in
the second half.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path

import torch

from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from fednorm.system import keep_memory

SETTING = {
    "strategies": ["silobn"], "seeds": 1, "clients": 12, "client_dropout": 0.25, "byzantine": 3,
    "attack": "sign_flip", "aggregator": "trimmed_mean", "statistics_aggregator": "median",
    "client_state_memory": 0, "engine": "loop", "batch_size": 4,
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "lr": 0.01},
}  # fmt: skip
PAGE = os.sysconf("SC_PAGE_SIZE")


def measure() -> tuple[int, int, int, int]:
    """Return resident kilobytes, open files, shared-memory blocks and temporary files."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE // 1024
    opened = len(list(Path("/proc/self/fd").iterdir()))
    shared = len(list(Path("/dev/shm").iterdir()))  # noqa: S108 (what is there is counted)
    ours = Path(tempfile.gettempdir())
    files = sum(1 for folder in ours.glob("fednorm-*") for _ in folder.rglob("*"))
    return resident, opened, shared, files


def main() -> None:
    """Run the rounds and print a line now and then."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=20, help="lines to print")
    chosen = parser.parse_args()
    logging.getLogger("fednorm").setLevel(logging.ERROR)  # rounds with few replies are repeated
    keep_memory()
    torch.set_num_threads(1)
    experiment = build_experiment({**SETTING, "rounds": chosen.rounds})
    prepared = prepare(experiment, experiment.strategies[0], 0)
    every = max(1, chosen.rounds // chosen.samples)
    seen, start = [], time.monotonic()
    print("round  seconds  resident kB  open files  shared blocks  temporary files")
    for result in prepared.rounds():
        if result.state.round % every == 0:
            seen.append((result.state.round, *measure()))
            number, resident, opened, shared, files = seen[-1]
            took = time.monotonic() - start
            print(f"{number:6}{took:8.0f}{resident:12}{opened:12}{shared:13}{files:15}", flush=True)
    half, last = seen[len(seen) // 2], seen[-1]
    grown = (last[1] - half[1]) * 1024 / max(1, last[0] - half[0])
    print(f"in the second half {grown:.0f} bytes a round")


if __name__ == "__main__":
    main()
