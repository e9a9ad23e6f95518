"""Seconds per round of the simulator, of Flower's simulation and of a Flower deployment.

Run it with `python benchmarks/engines.py`, where "fednorm[flower]" and the tests' requirements are
installed. All three do the same work and end with the same model; what differs is what it costs to
carry messages. The first round, in which processes start, is left out. The deployment is a
SuperLink and two SuperNodes on this machine, with TLS.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.flower.submit import SuperLink, submit
from fednorm.experiment.results import Event
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flower.deployment import Deployment

VALUES = {
    "strategies": ["fbn"], "seeds": 1, "clients": 2, "rounds": 6, "model": "resnet20",
    "algorithm": {"name": "fedavg", "lr": 0.05}, "local_steps": 5, "eval_every": 1,
}  # fmt: skip


class Clock:
    """When rounds ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, event: Event) -> None:
        """Note a round."""
        del event
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The median over all rounds but the first."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return statistics.median(after - before for before, after in pairs)


def experiment(engine: str) -> Experiment:
    """Return the work, for an engine."""
    return build_experiment({**VALUES, "engine": engine})


def here(engine: str) -> float:
    """Measure an engine of this process."""
    clock = Clock()
    run_comparison(experiment(engine), monitor=Monitor([clock]))
    return clock.seconds


def deployed(folder: Path) -> float:
    """Measure a deployment."""
    clock = Clock()
    with Deployment(folder) as deployment:
        for number in range(2):
            deployment.node(number)
        link = SuperLink(deployment.address, folder / "ca.crt")
        submit(experiment("flower"), link, folder / "out", Monitor([clock]))
    return clock.seconds


if __name__ == "__main__":
    loop = here("loop")
    print(f"simulator           {loop:8.3f} s a round", flush=True)
    simulation = here("flower")
    print(f"Flower simulation   {simulation:8.3f} s a round, {simulation / loop:6.1f} times")
    with tempfile.TemporaryDirectory() as place:
        deployment = deployed(Path(place))
    print(f"Flower deployment   {deployment:8.3f} s a round, {deployment / loop:6.1f} times")
