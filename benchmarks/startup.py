"""How long commands take that only tell something, in two checkouts side by side.

    python benchmarks/startup.py OLD NEW [--repeats 7]

OLD and NEW are folders with `src/fednorm`. The two take turns, so that both see the same load of
the machine; the medians of elapsed and of processor seconds are printed, and NEW's share of OLD's.
`python -X importtime -m fednorm --help` tells where the time goes.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "--help": (),
    "compare --help": (),
    "list": (),
    "show strategy fbn": (),
    "--show-completion bash": (),
    "completion of --part": (
        ("_FEDNORM_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "fednorm compare --part"),
        ("COMP_CWORD", "2"),
    ),
}


def measure(checkout: Path, command: str) -> tuple[float, float]:
    """Return the elapsed and the processor seconds of one call."""
    more = dict(COMMANDS[command])
    call = "import sys; sys.argv[0] = 'fednorm'; from fednorm.cli import main; main()"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", call, *(() if more else command.split())],
        env={**os.environ, **more, "PYTHONPATH": str(checkout / "src")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    checkouts = (options.old, options.new)
    print(f"{'command':24} {'elapsed s: old':>14} {'new':>6} {'share':>6}", end=" ")
    print(f"{'processor s: old':>17} {'new':>6} {'share':>6}")
    for command in COMMANDS:
        for checkout in checkouts:
            measure(checkout, command)  # compiles, and warms the cache of files
        turns = [[measure(c, command) for c in checkouts] for _ in range(options.repeats)]
        old, new = ([statistics.median(t) for t in zip(*of)] for of in zip(*turns))  # noqa: B905
        print(f"{command:24}", end=" ")
        print(f"{old[0]:14.2f} {new[0]:6.2f} {new[0] / old[0]:6.2f}", end=" ")
        print(f"{old[1]:17.2f} {new[1]:6.2f} {new[1] / old[1]:6.2f}")


if __name__ == "__main__":
    main()
