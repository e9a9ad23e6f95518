"""How much time large steps lose when memory is given back: FBN's CNN on 500 images.

Two processes side by side, one with `keep_memory` and one without, pass by pass.

    python benchmarks/allocator.py
"""

import subprocess
import sys
from statistics import median

STEP = """
import sys, time, torch
from fednorm.system import keep_memory
from fednorm.models import build
if sys.argv[1] == "keep":
    assert keep_memory()
torch.set_num_threads(1)
model = build("fbn_cnn", (3, 32, 32), 10, seed=0).to(memory_format=torch.channels_last)
x = torch.randn(500, 3, 32, 32).contiguous(memory_format=torch.channels_last)
y = torch.randint(10, (500,))
for line in sys.stdin:
    start = time.process_time()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    print(time.process_time() - start, flush=True)
"""


def main(passes: int = 6) -> None:
    """Print the seconds of each pass and the median of their ratios."""
    command = [sys.executable, "-c", STEP]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {name: subprocess.Popen([*command, name], **pipes) for name in ("keep", "plain")}
    rows = []
    for number in range(passes):
        row = {}
        for name, process in processes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            row[name] = float(process.stdout.readline())
        print(f"pass {number}: kept {row['keep']:.2f} s, as it is {row['plain']:.2f} s")
        rows.append(row)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    ratio = median(row["keep"] / row["plain"] for row in rows[1:])
    print(f"kept / as it is, median after the first pass: {ratio:.2f}")


if __name__ == "__main__":
    main()
