"""What is timed: one process for each contender, which makes a round whenever it is told to.

    python benchmarks/contenders.py NAME WORK

reads a number of rounds from each line of its input, makes them, and writes the median seconds of a
round and its peak memory.
"""

import resource
import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional
from works import WORKS, Work, as_floats, network, tensors

from fednorm.data import Dataset
from fednorm.data.transforms import BatchTransform
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.config import Experiment
from fednorm.system import count_cores, keep_memory

_LONG = 10_000  # rounds: longer than any measurement


def images(seed: int) -> Dataset:
    """Return the images of the work named on the command line."""
    del seed
    x, y = tensors(work := WORKS[sys.argv[2]])
    transform = BatchTransform(mean=(0.5,) * work.shape[0], std=(0.25,) * work.shape[0])
    return Dataset("images", x, y, x[:10], y[:10], 10, transform=transform)


def reference(work: Work, threads: int) -> Iterator[None]:
    """The same images through one model: no clients, no server, no federated work at all.

    With one step a round the clients' batches are one merged batch.
    """
    torch.set_num_threads(threads)
    model = network(work).train()
    last = len(work.shape) == 3 and work.name != "D"  # noqa: PLR2004
    memory = torch.channels_last if last else torch.contiguous_format
    model = model.to(memory_format=memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
    x, y = tensors(work)
    size = work.batch * work.sampled if work.steps == 1 else work.batch
    count = work.sampled * work.steps * work.batch // size
    while True:
        for _ in range(count):
            chosen = torch.randint(len(x), (size,))
            batch = as_floats(x[chosen]).contiguous(memory_format=memory)
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), y[chosen]).backward()
            optimizer.step()
        yield


def ours(work: Work, strategy: str, processes: int, **settings: object) -> Iterator[None]:
    """Rounds of this library."""
    torch.set_num_threads(1)
    name = "dsgd" if work.steps == 1 else "fedavg"
    experiment = Experiment(
        strategies=[strategy],
        data="digits" if work.name == "D" else "contenders:images",
        model=work.model,
        partition="gamma=0" if work.name == "D" else "iid",
        clients=work.clients,
        participation=work.sampled / work.clients,
        batch_size=work.batch,
        local_steps=work.steps,
        rounds=_LONG,
        algorithm={"name": name, "lr": work.lr, "momentum": work.momentum},
        seeds=[0],
        **settings,
    )
    prepared = prepare(experiment, experiment.strategies[0], 0, processes=processes)
    for _ in prepared.rounds():
        yield


CONTENDERS: dict[str, Callable[[Work], Iterator[None]]] = {
    "reference": lambda work: reference(work, count_cores()),
    "reference, 1 thread": lambda work: reference(work, 1),
    "loop": lambda work: ours(work, "naive", 1, engine="loop"),
    "naive": lambda work: ours(work, "naive", count_cores()),
    "fbn": lambda work: ours(work, "fbn", count_cores()),
    "naive bf16": lambda work: ours(work, "naive", count_cores(), precision="bf16"),
}


def timed(rounds: Iterator[None]) -> float:
    """Make a round; return its seconds."""
    start = perf_counter()
    next(rounds)
    return perf_counter() - start


def main() -> None:
    """Make rounds as long as there are lines to read."""
    keep_memory()
    rounds = CONTENDERS[sys.argv[1]](WORKS[sys.argv[2]])
    for line in sys.stdin:
        seconds = median(timed(rounds) for _ in range(int(line)))
        own, others = (
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        print(seconds, max(own, others) / 1024, flush=True)


if __name__ == "__main__":
    main()
