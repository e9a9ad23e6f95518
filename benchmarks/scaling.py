"""Cost of every strategy from 10 to 10 000 clients: time, memory and bytes.

    python benchmarks/scaling.py                       # all strategies
    python benchmarks/scaling.py --strategies naive,fbn,fedbn --rounds 20

At most 100 clients take part in a round, each with 5 steps on batches of 10 images of 8×8 pixels in
a small residual network. Every line is a separate process with one thread: seconds of processor
time per client and round (the median round), the memory that the run takes beyond what the process
and the data take, what a client sends and receives in a round, and the time relative to `naive`.
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from time import process_time

SIZES = (10, 100, 1_000, 10_000)
HELD = 20  # images of a client


def images(seed: int) -> object:
    """Return `HELD` images for each client."""
    import torch  # noqa: PLC0415 (the parent needs none of it)

    from fednorm.data import Dataset  # noqa: PLC0415

    count = HELD * int(sys.argv[2])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    y = torch.randint(10, (count,), generator=generator)
    return Dataset("images", x, y, x[:10], y[:10], 10)


def one(strategy: str, clients: int, rounds: int) -> dict[str, float]:
    """Measure one line, in this process."""
    from fednorm.experiment.prepare import prepare  # noqa: PLC0415
    from fednorm.experiment.schema.load import build_experiment  # noqa: PLC0415
    from fednorm.system import limit_threads, measure_peak  # noqa: PLC0415

    experiment = build_experiment(
        {
            "strategies": [strategy],
            "data": "scaling:images",
            "model": {"name": "resnet", "widths": [8, 16]},
            "partition": "iid",
            "clients": clients,
            "participation": min(1.0, 100 / clients),
            "algorithm": {"name": "fedavg", "lr": 0.01},
            "batch_size": 10,
            "local_steps": 5,
            "rounds": rounds,
            "seeds": [0],
        }
    )
    with limit_threads(1):
        prepared = prepare(experiment, experiment.strategies[0], 0)
        times, sent = [], (0.0, 0.0)
        with measure_peak() as found:
            start = process_time()
            for result in prepared.rounds():
                times.append(process_time() - start)
                sent = result.bytes_up, result.bytes_down
                start = process_time()
    return {
        "seconds": median(times[1:]) / min(100, clients),
        "megabytes": (found.bytes or 0) / 1e6,
        "up": sent[0],
        "down": sent[1],
        "engine": prepared.engine.name,
    }


def main() -> None:
    """Print the table."""
    from fednorm.strategies import STRATEGIES  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    columns = ("strategy", "engine", "clients", "ms per client", "MB", "kB up", "kB down", "naive")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    naive: dict[int, float] = {}
    for name in sorted(chosen.strategies.split(","), key=lambda name: name != "naive"):
        for clients in SIZES:
            command = [sys.executable, __file__, name, str(clients), str(chosen.rounds)]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            if found.returncode:
                print(f"| {name} | {found.stderr.strip().splitlines()[-1]} | | | | | | |")
                break
            line = json.loads(found.stdout.splitlines()[-1])
            naive.setdefault(clients, line["seconds"])
            print(
                f"| {name} | {line['engine']} | {clients} | {line['seconds'] * 1e3:.2f} | "
                f"{line['megabytes']:.0f} | {line['up'] / 1e3:.1f} | {line['down'] / 1e3:.1f} | "
                f"{line['seconds'] / naive[clients]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():  # noqa: PLR2004
        print(json.dumps(one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
