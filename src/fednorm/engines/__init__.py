"""Engines: how the clients of a round are trained, one after the other or faster.

All give what the loop gives, bit by bit or within rounding. One that is asked for by name and is
not exact for a run is refused with the reason.
"""

from collections.abc import Iterator
from dataclasses import replace

from fednorm.engines.barrier import BarrierEngine
from fednorm.engines.base import Engine, EngineRun, Progress, RoundResult
from fednorm.engines.flower import FlowerEngine
from fednorm.engines.loop import LoopEngine
from fednorm.engines.merged_batch import MergedEngine
from fednorm.engines.processes import ProcessEngine
from fednorm.engines.stacked import StackedEngine, choose_size
from fednorm.system import count_cores

ENGINES: dict[str, Engine] = {
    "loop": LoopEngine(),
    "merged": MergedEngine(),
    "stacked": StackedEngine(),
    "barrier": BarrierEngine(),
    "processes": ProcessEngine(),
    "flower": FlowerEngine(),
}

_WORTHWHILE = 20.0  # seconds of training, above which it pays to start processes


def choose(run: EngineRun) -> Engine:
    """Return the engine that `run` asks for, or with 'auto' the fastest exact one.

    The choice depends on the experiment alone, never on the machine: engines differ in rounding.
    Raises ValueError if the engine that was asked for is not exact.
    """
    if run.engine == "auto":
        return next(engine for engine in _list_preferred(run) if engine.why_not(run) is None)
    engine = ENGINES[run.engine]
    if reason := engine.why_not(run):
        raise ValueError(f"{reason}; choose engine 'auto' or 'loop'.")
    return engine


def _list_preferred(run: EngineRun) -> Iterator[Engine]:
    """Yield the engines that pay for `run`, the fastest first.

    One pass for all clients saves calls, which matters to small models, and exchanges. A user's
    model may be random, or mix samples, where no check sees it: 'merged' and 'barrier' take the
    library's own models only.
    """
    small = choose_size(run.task, run.list_first_batches()) > 1
    if run.ours and (small or run.task.strategy.exchanges):
        yield ENGINES["merged"]
    if small:
        yield ENGINES["stacked"]
    if run.ours:
        yield ENGINES["barrier"]
    yield ENGINES["loop"]


def count_processes(engine: Engine, run: EngineRun) -> int:
    """Return in how many of `run.processes` processes `engine` should train the clients.

    Starting processes takes seconds, which a short run does not win back. The result is the same
    with any number of them.
    """
    if engine.name == "processes":
        return max(1, count_cores() // run.threads)
    if engine.name not in ("loop", "stacked") or run.engine == "loop" or run.processes == 1:
        return 1
    steps = sum(len(own.batch_sizes) for own in run.list_first_batches())
    pays = run.step_seconds * steps * run.rounds > _WORTHWHILE
    return run.processes if pays and ENGINES["processes"].why_not(run) is None else 1


def run_rounds(
    engine: Engine, run: EngineRun, start: Progress | None = None
) -> Iterator[RoundResult]:
    """Run the rounds of `run`, or those after `start`, in several processes where that pays."""
    count = min(count_processes(engine, run), len(run.clients.participants(1)))
    if count > 1:
        engine = ProcessEngine(stacked=engine.name == "stacked")
    elif engine.name == "processes":
        engine = ENGINES["loop"]
    return engine.rounds(replace(run, processes=count), start)
