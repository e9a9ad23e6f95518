"""Small runs whose numbers must not change by a change of the code's form alone.

`python tests/golden/runs.py` writes them anew, which a change of behaviour may need; its commit
says why. Another processor may round otherwise: there the numbers must be near, and
`python tests/golden/runs.py --add` adds its bits to the record.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from fednorm.experiment.job import Job, execute_job
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import UNWATCHED
from fednorm.experiment.schema.load import build_experiment

RECORD = Path(__file__).with_name("runs.json")
NUMBERS = ("loss", "train_loss", "accuracy")
SMALL = {"name": "resnet", "widths": [4, 6]}
COMMON = {"clients": 5, "rounds": 6, "seeds": [1], "eval_every": 2, "dtype": "float64"}
LOCAL = {
    "algorithm": {"name": "fedavg", "lr": 0.05},
    "local_steps": 3,
    "partition": "dirichlet=0.3",
}

RUNS = {
    "naive, merged batch": {"strategies": ["naive"], "engine": "merged"},
    "fbn, stacked clients": {"strategies": ["fbn"], "model": SMALL, "engine": "stacked", **LOCAL},
    "fixbn in the loop": {
        "strategies": [{"name": "fixbn", "freeze_round": 3, "statistics": "pool"}],
        "engine": "loop",
        **LOCAL,
    },
    "dualbn with unequal clients": {
        "strategies": ["dualbn"],
        "model": SMALL,
        **LOCAL,
        "partition": "dirichlet_unbalanced=1.0",
    },
    "naive, one local epoch of unequal clients": {
        "strategies": [{"name": "naive", "statistics": "pool"}],
        **LOCAL,
        "partition": "dirichlet_unbalanced=1.0",
        "local_steps": None,
        "local_epochs": 1,
        "rounds": 2,  # a last batch of two samples magnifies rounding: later, processors differ
    },
    "fedtan side by side": {
        "strategies": ["fedtan"],
        "model": SMALL,
        "engine": "barrier",
        **LOCAL,
        "local_steps": 2,
    },
    "fedbn, half of the clients": {"strategies": ["fedbn"], "participation": 0.5, **LOCAL},
    "hbn": {"strategies": ["hbn"], "model": SMALL, **LOCAL},
    "heterofl with Adam": {
        "strategies": ["heterofl"],
        **LOCAL,
        "algorithm": {"name": "fedavg", "lr": 0.01, "optimizer": "adam"},
    },
    "fbn, attacked and defended": {
        "strategies": ["fbn"],
        "byzantine": 1,
        "attack": "sign_flip",
        "attack_target": "statistics",
        "statistics_aggregator": "nnm > median",
        "partition": "gamma=0",
    },
    "fedwon, clipped": {"strategies": [{"name": "fedwon", "clip": 0.01}], "model": SMALL, **LOCAL},
    "centralized": {"strategies": ["centralized"], "model": SMALL, **LOCAL},
}


def processor():
    """Return what decides how torch rounds: its version and the processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    known = dict(line.split("\t", 1) for line in lines if "\t" in line)
    model = [known.get(key, "").strip("\t: ") for key in ("vendor_id", "cpu family", "model")]
    used = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {' '.join(model)}, {used}"


def run(name):
    """Return losses and accuracies of a run, and a hash of its final weights."""
    settings = {k: v for k, v in RUNS[name].items() if v is not None}
    experiment = build_experiment({**COMMON, **settings})
    prepared = prepare(experiment, experiment.strategies[0], experiment.seeds[0])
    job = Job(experiment, prepared.entry, prepared.seed)
    result = execute_job(job, UNWATCHED, prepared=prepared)
    if result.status != "finished":
        raise RuntimeError(f"{name}: {result.status}: {result.error}")
    tensors = prepared.task.model.state_dict()  # which holds the final state, as it was trained
    digest = hashlib.sha256()
    for key in sorted(tensors.keys() - prepared.task.layout.personal.keys()):
        digest.update(key.encode() + tensors[key].contiguous().numpy().tobytes())
    return {
        "loss": [entry.loss for entry in result.history],
        "train_loss": [entry.train_loss for entry in result.history],
        "accuracy": [entry.accuracy for entry in result.history],
        "weights": digest.hexdigest(),
    }


def bits(found):
    """Return a hash of all numbers of a run."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {name: run(name) for name in RUNS}
    record = {"bits": {}, "runs": {n: {k: r[k] for k in NUMBERS} for n, r in made.items()}}
    if "--add" in sys.argv:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["bits"][processor()] = {name: bits(found) for name, found in made.items()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(RUNS)} runs in {RECORD}\n")
