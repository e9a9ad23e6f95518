"""How long a round takes: this library, a reference without clients, and other simulators.

    python benchmarks/simulators.py            # works A to D, see works.py
    python benchmarks/simulators.py --work C --passes 9
    make peers && python benchmarks/simulators.py --peers

Every contender is a separate process. A pass is one round of each, one after the other; what is
printed are medians of the ratios within a pass, because machines are noisy. The reference is the
faster one of one thread and all threads. Peers that are installed run their rounds in one go,
before and after the passes.
"""

import argparse
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from works import WORKS

from fednorm.system import count_cores, has_bfloat16

HERE = Path(__file__).parent
NAMES = ["reference", "reference, 1 thread", "loop", "naive", "fbn", "naive bf16"]
# Flower and pfl share clients among processes; the others train them in turn.
PEERS = {
    "Flower": ["flower"],
    "pfl": ["pfl"],
    **{
        f"{name}, {threads} thread{'s' * (threads > 1)}": [name.lower(), str(threads)]
        for name in ("FedLab", "fluke", "ByzFL")
        for threads in (1, 2)
    },
}
WARM = 2  # rounds that are not counted


class Contender:
    """A process that makes a round when it is told to."""

    def __init__(self, name: str, work: str) -> None:
        command = [sys.executable, str(HERE / "contenders.py"), name, work]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=HERE, **pipes)
        self.memory = 0.0

    def round(self, rounds: int = 1) -> float:
        """Make `rounds` rounds; return the median of their seconds."""
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        seconds, self.memory = map(float, self.process.stdout.readline().split())
        return seconds

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()


def peer(title: str, work: str, rounds: int) -> list[float]:
    """Return the seconds of each round of a peer, without the first."""
    name, *threads = PEERS[title]
    python = HERE.parent / ".venv-peers" / name / "bin" / "python"
    if not python.exists():
        return []
    command = [str(python), str(HERE / "peers" / f"{name}.py"), work, str(rounds + 1)]
    command += threads
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    lines = [line for line in found.stdout.splitlines() if line.replace(".", "").isdigit()]
    return [float(line) for line in lines][1:]


def measure(work: str, passes: int, names: list[str], *, peers: bool) -> None:
    """Print the table of one work."""
    contenders = {name: Contender(name, work) for name in names}
    others: dict[str, list[float]] = {name: [] for name in PEERS} if peers else {}
    at_once = 100 if work == "D" else 1  # milliseconds are too short for one at a time
    try:
        for contender in contenders.values():
            for _ in range(WARM):
                contender.round()
        for name, found in others.items():
            found.extend(peer(name, work, max(2, passes // 2)))
        rows = [
            {name: contender.round(at_once) for name, contender in contenders.items()}
            for _ in range(passes)
        ]
        for name, found in others.items():
            found.extend(peer(name, work, max(2, passes // 2)))
    finally:
        for contender in contenders.values():
            contender.close()
    references = [name for name in names if name.startswith("reference")]
    best = min(references, key=lambda name: median(row[name] for row in rows))
    print(f"\nwork {work}: {WORKS[work]}\n")
    print(f"| contender | seconds a round | ratio to {best} | least and most | peak MB |")
    print("|---|---|---|---|---|")
    for name, contender in contenders.items():
        ratios = sorted(row[name] / row[best] for row in rows)
        seconds = median(row[name] for row in rows)
        print(
            f"| {name} | {seconds:.4f} | {median(ratios):.2f} | "
            f"{ratios[0]:.2f}, {ratios[-1]:.2f} | {contender.memory:.0f} |"
        )
    middle = median(row[best] for row in rows)
    for name, found in others.items():
        if found:
            shown = f"{median(found):.4f} | {median(found) / middle:.2f}"
            print(f"| {name} | {shown} | {min(found) / middle:.2f}, "
                  f"{max(found) / middle:.2f} | |")  # fmt: skip
        else:
            print(f"| {name} | not installed: make peers | | | |")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", choices=[*WORKS, "all"], default="all")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--peers", action="store_true", help="other simulators too")
    parser.add_argument("--only", help="contenders, separated by commas")
    chosen = parser.parse_args()
    names = chosen.only.split(",") if chosen.only else list(NAMES)
    if not has_bfloat16() and not chosen.only:
        print("This processor has no products in bfloat16: that contender is left out.")
        names.remove("naive bf16")
    bf16 = "with" if has_bfloat16() else "without"
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, "
        f"{count_cores()} cores {bf16} bfloat16, torch {version('torch')}, "
        f"Python {platform.python_version()}"
    )
    for work in WORKS if chosen.work == "all" else [chosen.work]:
        measure(work, chosen.passes, names, peers=chosen.peers)


if __name__ == "__main__":
    main()
