"""Every strategy at its best learning rate, by local steps a round and partition, on CIFAR-10.

A cell is a number of local steps and a partition; all cells take the same number of local steps in
all. In each, a strategy's learning rate is chosen from the same three by its accuracy on 2000
training images that were held out (seed 0); then it is tested on the test images with other seeds.
Cells that decide come first. Finished runs are recorded in local_steps.json next to this file and
not made again; runs that were interrupted resume from the checkpoints in `--out`.

    python benchmarks/local_steps.py --workers 2
    python benchmarks/local_steps.py --table
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from pathlib import Path

import fednorm
from fednorm.experiment.schema.load import read_toml

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "study-local-steps.toml"
RECORD = HERE / "local_steps.json"
RATES = (0.005, 0.02, 0.08)
SEEDS = (1, 2, 3)
# A round of hbn begins with a pass over all data: a run of 2000 rounds would take hours.
FEWEST_STEPS = {"hbn": 20}
CELLS = (
    ("shards=0.2", 100),
    ("dirichlet=0.1", 100),
    ("shards=0.2", 20),
    ("shards=0.2", 1),
    ("iid", 100),
    ("dirichlet=0.1", 20),
    ("dirichlet=0.1", 1),
    ("dirichlet=0.5", 100),
    ("shards=0.2", 5),
    ("dirichlet=0.1", 5),
    ("dirichlet=0.5", 20),
    ("dirichlet=0.5", 1),
    ("dirichlet=0.5", 5),
    ("iid", 20),
    ("iid", 1),
    ("iid", 5),
)


@dataclass(frozen=True, order=True)
class Run:
    """One strategy in a cell, at a learning rate, with a seed."""

    part: str  # "validation" or "test"
    partition: str
    steps: int  # local steps a round
    strategy: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Its name in the record."""
        return " ".join(map(str, astuple(self)))


def make_settings(run: Run) -> dict[str, object]:
    """Return the settings of a run."""
    settings = read_toml(CONFIG)
    rounds = settings["rounds"] * settings["local_steps"] // run.steps
    data = settings["data"]
    if run.part == "validation":
        data = {"name": "fednorm.doctor.race:hold_out", "of": data}
    return settings | {
        "strategies": [run.strategy],
        "seeds": [run.seed],
        "partition": run.partition,
        "local_steps": run.steps,
        "rounds": rounds,
        "eval_every": rounds // 4,
        "data": data,
        "algorithm": settings["algorithm"] | {"lr": run.rate},
    }


def execute(run: Run, out: Path) -> float:
    """Return the accuracy in % after the last round; 0 if the run diverged."""
    folder = out / run.key.replace(" ", "_")
    [done] = fednorm.compare(**make_settings(run), out=folder, workers=1).runs  # type: ignore[arg-type]
    return 100 * done.history[-1].accuracy if done.status == "finished" else 0.0


def read_record() -> dict[str, float]:
    """Return the accuracy of every finished run by its key."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def run_missing(runs: list[Run], out: Path, workers: int) -> None:
    """Make the runs that are not recorded, several at a time, and record each."""
    missing = [run for run in runs if run.key not in read_record()]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawned) as pool:
        started = {pool.submit(execute, run, out): run for run in missing}
        for future in as_completed(started):
            found = read_record() | {started[future].key: round(future.result(), 2)}
            text = json.dumps(dict(sorted(found.items())), indent=1)
            RECORD.write_text(text + "\n", encoding="utf-8")
            print(
                f"{time.strftime('%H:%M')} {started[future].key}: {future.result():.1f}", flush=True
            )


def list_validation(cell: tuple[str, int]) -> list[Run]:
    """Return the runs that choose the learning rates of a cell."""
    known = read_toml(CONFIG)["strategies"]
    names = [name for name in known if cell[1] >= FEWEST_STEPS.get(name, 1)]
    return [Run("validation", *cell, name, rate, 0) for rate in RATES for name in names]


def list_tests(cell: tuple[str, int]) -> list[Run]:
    """Return the runs that test every strategy at its learning rate, as far as it is known."""
    found = read_record()
    groups: dict[str, list[Run]] = {}
    for run in list_validation(cell):
        groups.setdefault(run.strategy, []).append(run)
    known = {name: runs for name, runs in groups.items() if all(run.key in found for run in runs)}
    best = {name: max(runs, key=lambda run: found[run.key]) for name, runs in known.items()}
    return [
        Run("test", *cell, name, run.rate, seed) for seed in SEEDS for name, run in best.items()
    ]


def list_lines(cell: tuple[str, int]) -> Iterator[str]:
    """Yield a line of the table for each strategy that was tested."""
    found, tests = read_record(), list_tests(cell)
    for name in dict.fromkeys(run.strategy for run in tests):
        own = [run for run in tests if run.strategy == name and run.key in found]
        values = [found[run.key] for run in own]
        if values:
            mean, rate = statistics.fmean(values), own[0].rate
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            yield f"| {name} | {mean:.1f}{spread} | {rate} | {len(own)} |"


def main() -> None:
    """Run the cells one after the other and print each as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/local-steps"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="how many, the first ones")
    parser.add_argument("--table", action="store_true", help="print what is recorded, run nothing")
    asked = parser.parse_args()
    for cell in CELLS[: asked.cells]:
        if not asked.table:
            run_missing(list_validation(cell), asked.out, asked.workers)
            run_missing(list_tests(cell), asked.out, asked.workers)
        if lines := list(list_lines(cell)):
            print(f"\n{cell[0]}, {cell[1]} local steps: strategy, accuracy, learning rate, seeds")
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
