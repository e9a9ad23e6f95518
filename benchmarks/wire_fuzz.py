"""Damaged answers of one Flower node of four, as the server unpacks them from the wire.

    python benchmarks/wire_fuzz.py --count 10000 --seed 0

Records, values, arrays, bytes of arrays and of Flower's own objects are changed at random, in all
answers that the server reads: replies, exchanges, calibrations, evaluations and partitions of
`fednorm run`, and replies and evaluations of `NormStrategy`. Prints what became of them; ends with
an error if the server failed, waited, or rejected an honest node.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from flower.wire_fuzz import fuzz


def main() -> None:
    """Print a table of outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="messages")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # numpy's, of headers that it reads
    begun = time.monotonic()
    counts, crashes = fuzz(chosen.count, chosen.seed)
    for (place, outcome), count in sorted(counts.items()):
        print(f"{place:<16} {outcome:<10} {count:>6}")
    print(f"{sum(counts.values())} messages, {len(crashes)} failures, ", end="")
    print(f"{time.monotonic() - begun:.0f} s, seed {chosen.seed}")
    for number, place, what in crashes[:20]:
        print(f"message {number}, {place}: {what}")
    sys.exit(bool(crashes))


if __name__ == "__main__":
    main()
