"""Every strategy at its best learning rate, by local steps a round and partition, on CIFAR-10.

A cell is a number of local steps and a partition; all cells take the same number of local steps in
all. In each, a strategy's learning rate is chosen from the same three by its accuracy on 2000
training images that were held out (seed 0); then it is tested on the test images with other seeds.
Cells that decide come first. Runs are kept in the folder: the same command resumes.

    python benchmarks/local_steps.py --out results/local-steps --workers 2
"""

import argparse
import statistics
import time
from pathlib import Path

import fednorm
from fednorm.experiment.results import Comparison
from fednorm.experiment.schema.load import read_toml

CONFIG = Path(__file__).parents[1] / "configs" / "study-local-steps.toml"
RATES = (0.005, 0.02, 0.08)
SEEDS = (1, 2, 3)
CELLS = (
    ("shards=0.2", 100),
    ("shards=0.2", 1),
    ("dirichlet=0.1", 100),
    ("shards=0.2", 20),
    ("dirichlet=0.1", 1),
    ("dirichlet=0.1", 20),
    ("shards=0.2", 5),
    ("dirichlet=0.5", 100),
    ("iid", 100),
    ("dirichlet=0.1", 5),
    ("dirichlet=0.5", 1),
    ("dirichlet=0.5", 20),
    ("dirichlet=0.5", 5),
    ("iid", 1),
    ("iid", 20),
    ("iid", 5),
)
Cell = tuple[str, int]


def make_settings(cell: Cell, rate: float, *, validate: bool) -> dict[str, object]:
    """Return the settings of a cell at a learning rate."""
    settings = read_toml(CONFIG)
    partition, steps = cell
    rounds = settings["rounds"] * settings["local_steps"] // steps
    data = settings["data"]
    if validate:
        data = {"name": "fednorm.doctor.race:hold_out", "of": data}
    return settings | {
        "partition": partition,
        "local_steps": steps,
        "rounds": rounds,
        "eval_every": rounds // 4,
        "data": data,
        "algorithm": settings["algorithm"] | {"lr": rate},
    }


def name_folder(out: Path, part: str, cell: Cell, rate: float) -> Path:
    """Return the folder of a part of a cell."""
    return out / part / f"{cell[0]}-E{cell[1]}" / f"lr{rate}"


def run_part(out: Path, settings: dict[str, object], folder: Path, workers: int) -> Comparison:
    """Run what is missing of a comparison."""
    print(f"{time.strftime('%H:%M')} {folder.relative_to(out)}", flush=True)
    return fednorm.compare(**settings, out=folder, workers=workers)  # type: ignore[arg-type]


def score(comparison: Comparison) -> dict[str, list[float]]:
    """Return the accuracies after the last round by strategy; a run that diverged has 0."""
    found: dict[str, list[float]] = {}
    for run in comparison.runs:
        accuracy = run.history[-1].accuracy if run.status == "finished" else 0.0
        found.setdefault(run.strategy, []).append(100 * accuracy)
    return found


def choose_rates(out: Path, cell: Cell, workers: int) -> dict[str, float]:
    """Return each strategy's learning rate of the highest accuracy on held-out images."""
    scores: dict[str, dict[float, float]] = {}
    for rate in RATES:
        settings = make_settings(cell, rate, validate=True) | {"seeds": [0]}
        folder = name_folder(out, "validation", cell, rate)
        for label, values in score(run_part(out, settings, folder, workers)).items():
            scores.setdefault(label, {})[rate] = values[0]
    return {label: max(found, key=lambda rate: found[rate]) for label, found in scores.items()}


def test_cell(out: Path, cell: Cell, workers: int, seeds: list[int]) -> dict[str, str]:
    """Test every strategy at its learning rate; return a line of the table for each."""
    rates = choose_rates(out, cell, workers)
    lines = {}
    for rate in RATES:
        chosen = [label for label, best in rates.items() if best == rate]
        if chosen:
            settings = make_settings(cell, rate, validate=False)
            settings |= {"strategies": chosen, "seeds": seeds}
            folder = name_folder(out, "test", cell, rate)
            for label, values in score(run_part(out, settings, folder, workers)).items():
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                lines[label] = f"{statistics.fmean(values):.1f}{spread} (lr {rate})"
    return lines


def main() -> None:
    """Run the cells one after the other and print each as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/local-steps"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="how many, the first ones")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of 1, 2 and 3")
    asked = parser.parse_args()
    for cell in CELLS[: asked.cells]:
        print(f"\n{cell[0]}, {cell[1]} local steps, seeds {SEEDS[: asked.seeds]}")
        found = test_cell(asked.out, cell, asked.workers, list(SEEDS[: asked.seeds]))
        for label, line in found.items():
            print(f"| {label} | {line} |", flush=True)


if __name__ == "__main__":
    main()
