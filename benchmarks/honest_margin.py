"""How far honest clients are from being outliers, and what a client can do that is none.

    python benchmarks/honest_margin.py            # the largest ratio in honest federations
    python benchmarks/honest_margin.py --figures  # in the published settings, two rounds
    python benchmarks/honest_margin.py --damage   # accuracy with one false client of ten
    python benchmarks/honest_margin.py --algorithms  # the same of algorithms with a server's state

A reply is rejected if something of it is more than `outlier_factor` times the median over clients,
and than as many times the server's own scale. The first table has the largest such ratio of every
kind that occurs in federations that differ as much as they can: one class for each client, other
images on each, unequal clients, two or three of them, one step and local epochs, and learning
rates at which training fails. The others run attacks of growing size.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

from fednorm.core.messages import Reply
from fednorm.core.replies import plausibility
from fednorm.core.replies.plausibility import Quantity, find_median
from fednorm.core.task import OUTLIER_FACTOR
from fednorm.engines import loop
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import run
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.reproduce.figure import list_figures, scale_figure

Largest = dict[str, tuple[float, str]]
SMALL = {"name": "resnet", "widths": [4, 6]}
COMMON = {"rounds": 20, "seeds": [0], "engine": "loop", "eval_every": 1000}
PARTITIONS = (
    "gamma=0",
    "shards=0.2",
    "dirichlet=0.1",
    "dirichlet_unbalanced=0.3",
    "gamma=0 + feature_shift=brightness",
)
STRATEGIES = ("naive", "heterofl", "fbn", "dualbn", "alignbn", "hbn", "feddna", "gn")
ONE_STEP = {"algorithm": {"name": "dsgd", "lr": 0.05, "momentum": 0.9}}
EPOCHS = {"algorithm": {"name": "fedavg", "lr": 0.05}, "local_epochs": 2, "rounds": 5}
MOMENTUM = {
    "algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9, "momentum_state": "global"},
    "local_steps": 10,
    "rounds": 5,
}
WORK = {"one step": ONE_STEP, "2 epochs": EPOCHS, "10 steps, momentum": MOMENTUM}


def list_settings() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield a name and the settings of every honest federation."""
    for partition, strategy, work in itertools.product(PARTITIONS, STRATEGIES, WORK):
        settings = {"partition": partition, "strategies": [strategy], **WORK[work]}
        yield f"{strategy}, {partition}, {work}", {"clients": 10, **settings}
    for clients, strategy in itertools.product((2, 3), ("naive", "fbn", "gn")):
        settings = {"partition": "gamma=0", "clients": clients, "strategies": [strategy]}
        yield f"{strategy}, {clients} clients", {**settings, **EPOCHS}
    for strategy, work in itertools.product(("naive", "fbn", "dualbn", "gn"), WORK):
        base = {"partition": "gamma=0", "clients": 5, "model": SMALL, "strategies": [strategy]}
        yield f"{strategy}, resnet, {work}", {**base, **WORK[work], "rounds": 5}
    for strategy, rate in itertools.product(("naive", "fbn", "gn", "fixbn"), (1.0, 10.0)):
        work = {"algorithm": {"name": "fedavg", "lr": rate}, "local_steps": 20, "rounds": 5}
        base = {"partition": "gamma=0", "clients": 10, "strategies": [strategy]}
        yield f"{strategy}, learning rate {rate:g}", {**base, **work}


def note_ratios(
    largest: Largest,
    name: str,
    sizes: Sequence[Mapping[Quantity, float]],
    factor: float,
    floor: Callable[[Quantity], float],
) -> dict[int, plausibility.Fault]:
    """Note the largest ratio of each kind of quantity, and find no outlier."""
    del factor
    for quantity in {quantity for own in sizes for quantity in own}:
        present = [own[quantity] for own in sizes if quantity in own]
        scale = max(find_median(present, float), floor(quantity))
        ratio = max(present) / scale if scale else 0.0
        if ratio > largest[quantity.kind][0]:
            largest[quantity.kind] = ratio, name
    return {}


def list_experiments() -> Iterator[tuple[str, Experiment, StrategySpec]]:
    """Yield every honest federation of `list_settings`."""
    for name, settings in list_settings():
        experiment = build_experiment({**COMMON, **settings})
        yield name, experiment, experiment.strategies[0]


def list_figures_runs() -> Iterator[tuple[str, Experiment, StrategySpec]]:
    """Yield every run without Byzantine clients of the published figures, two rounds of each."""
    for name, figure in list_figures().items():
        for panel, experiment in scale_figure(figure, "smoke") if figure.ring is None else ():
            for entry in experiment.strategies:
                if not entry.settings.get("byzantine", experiment.byzantine):
                    yield f"{name}, {panel.title}, {entry.title}", experiment, entry


def measure_margin(found: Iterable[tuple[str, Experiment, StrategySpec]]) -> None:
    """Print the largest ratio of each kind in honest federations, and where it is."""
    largest: Largest = defaultdict(lambda: (0.0, ""))
    failing: Largest = defaultdict(lambda: (0.0, ""))
    count, begun = 0, time.perf_counter()
    for name, experiment, entry in found:
        noted = failing if "rate" in name else largest
        note = partial(note_ratios, noted, name)
        with mock.patch.object(plausibility, "find_outliers", note):
            run(prepare(experiment, entry, 0))
        count += 1
    print(f"{count} federations, {time.perf_counter() - begun:.0f} s")
    for title, noted in (("", largest), (" (learning rate too large)", failing)):
        for kind, (ratio, name) in sorted(noted.items()):
            print(f"{kind}{title} | {ratio:.3g} | {name}")


def scale_update(factor: float, reply: Reply) -> Reply:
    """Return a reply with its update in the opposite direction, `factor` times as long."""
    return replace(reply, update={name: -factor * t for name, t in reply.update.items()})


def scale_all(factor: float, reply: Reply) -> Reply:
    """Return a reply whose update and control variates are opposite, `factor` times as long."""
    momentum = {name: -factor * t for name, t in reply.momentum.items()}
    return replace(scale_update(factor, reply), momentum=momentum)


def shift_means(factor: float, reply: Reply) -> Reply:
    """Return a reply whose means are `factor` times the layer's root mean square too large."""
    stats = {}
    for path, report in reply.stats.items():
        own = report.moments
        scale = float((own.mean.square().mean() + own.var.mean()).sqrt())
        stats[path] = replace(report, moments=replace(own, mean=own.mean + factor * scale))
    return replace(reply, stats=stats)


def claim_examples(factor: float, reply: Reply) -> Reply:
    """Return a reply that claims `factor` times its examples, with the opposite update."""
    return replace(scale_update(1.0, reply), examples=round(reply.examples * factor))


ATTACKS = {
    "opposite update, times": (scale_update, (1.0, 10.0, 100.0, 1e3, 1e5, 1e30)),
    "means shifted by, times the layer's root mean square": (shift_means, (10.0, 900.0, 1e4, 1e15)),
    "opposite update, and examples times": (claim_examples, (2.0**49,)),
}
GUARDED = 1e3  # larger attacks are also made without the guard
ROUNDS, FALSE = 100, 3  # the number of the false client
Change = Callable[[Reply], Reply]


def run_attacked(
    strategy: str, change: Change | None, first: int, guard: float, **more: object
) -> str:
    """Return the final accuracy with one false client, and how many of its replies are rejected."""
    settings = {"strategies": [strategy], "clients": 10, "partition": "gamma=0.3", "rounds": ROUNDS}
    experiment = build_experiment({**COMMON, **settings, "outlier_factor": guard, **more})

    def corrupt(replies: Sequence[Reply], _: object, number: int, **__: object) -> list[Reply]:
        lies = change is not None and (number == first or not first)
        return [change(r) if change and lies and r.client == FALSE else r for r in replies]

    with mock.patch.object(loop, "apply_attack", corrupt):
        result = run(prepare(experiment, experiment.strategies[0], 0))
    accuracy = f"{100 * result.final.accuracy:.1f}" if result.final else "–"
    status = "" if result.status == "finished" else f" {result.status}"
    return f"{accuracy}{status}" + (f" ({result.rejected})" if result.rejected else "")


def measure_damage() -> None:
    """Print accuracies by attack, its size and when it takes place, with rejected replies."""
    columns = [(strategy, first) for strategy in ("naive", "fbn") for first in (ROUNDS // 2, 0)]
    titles = [f"{strategy}, {'once' if first else 'always'}" for strategy, first in columns]
    print(" | ".join(["attack", "size", "guard", *titles]), flush=True)
    attacks = [("none", 0.0, None, OUTLIER_FACTOR)]
    for name, (attack, sizes) in ATTACKS.items():
        for size, guard in itertools.product(sizes, (OUTLIER_FACTOR, 0.0)):
            if guard or size > GUARDED:
                attacks.append((name, size, partial(attack, size), guard))
    for name, size, change, guard in attacks:
        cells = [run_attacked(strategy, change, first, guard) for strategy, first in columns]
        print(" | ".join([name, f"{size:g}", "on" if guard else "off", *cells]), flush=True)


ALGORITHMS: dict[str, dict[str, object]] = {
    "fedavg": {},
    "server momentum 0.9": {"server_momentum": 0.9},
    "server adam": {"server": "adam"},
    "server yogi": {"server": "yogi"},
    "server adagrad": {"server": "adagrad", "server_lr": 0.03},
    "scaffold": {"name": "scaffold"},
    "fednova": {"name": "fednova"},
    "feddyn": {"name": "feddyn"},
}
LENGTHS = (1.0, 10.0, 100.0, 1e3, 1e5)
SHORT = 30  # rounds, of five local steps


def measure_algorithms() -> None:
    """Print accuracies of algorithms by the length of a false client's opposite reply."""
    lengths = " | ".join(f"{length:g}" for length in LENGTHS)
    print(f"algorithm | strategy | when | none | {lengths}", flush=True)
    for (name, fields), strategy in itertools.product(ALGORITHMS.items(), ("naive", "fbn")):
        algorithm = {"name": "fedavg", "lr": 0.05, **fields}
        more = {"algorithm": algorithm, "local_steps": 5, "rounds": SHORT}
        run_one = partial(run_attacked, strategy, guard=OUTLIER_FACTOR, **more)
        honest = run_one(None, 0)
        lie = scale_all if name == "scaffold" else scale_update
        for first in (SHORT // 2, 0):
            cells = [run_one(partial(lie, length), first) for length in LENGTHS]
            when = "once" if first else "always"
            print(" | ".join([name, strategy, when, honest, *cells]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--damage", action="store_true", help="run attacks of growing size")
    parser.add_argument("--algorithms", action="store_true", help="run them on algorithms")
    parser.add_argument("--figures", action="store_true", help="measure the published settings")
    asked = parser.parse_args()
    if asked.damage:
        measure_damage()
    elif asked.algorithms:
        measure_algorithms()
    else:
        measure_margin(list_figures_runs() if asked.figures else list_experiments())
