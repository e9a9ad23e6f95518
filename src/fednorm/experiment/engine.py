"""Which engine runs an experiment: the one that was asked for, or the fastest that is exact."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from fednorm.core.messages import Batches
from fednorm.core.task import Task
from fednorm.data.federation import Federation
from fednorm.engines import barrier, loop, merged_batch, processes, stacked
from fednorm.engines.base import NO_FAULTS, ClientSource, Faults
from fednorm.engines.loop import RoundResult, Start
from fednorm.engines.processes import rounds as rounds_in_processes
from fednorm.experiment.config import Experiment
from fednorm.system import available_memory, count_cores

Rounds: TypeAlias = Callable[[Start | None], Iterator[RoundResult]]
_ROOM = 2_000_000_000  # bytes that clients may hold while they wait for each other
_WORTHWHILE = 20.0  # seconds of training, above which it pays to start processes


def choose(
    experiment: Experiment,
    task: Task,
    clients: Federation,
    *,
    ours: bool,
    conditions: Faults = NO_FAULTS,
) -> str:
    """Return the name of the engine; raise ValueError if the one asked for does not fit.

    The choice depends on the experiment alone, never on the machine: engines differ in rounding.
    """
    in_lockstep = merged_batch.fits(task, clients, conditions)
    misfit = ""
    if experiment.engine == "merged":
        misfit = _misfit_in_lockstep(task, clients, fits=in_lockstep, ours=ours)
    elif experiment.engine == "stacked":
        misfit = stacked.find_misfit(task, _first(clients))
    elif experiment.engine == "processes" and not (
        processes.fits(task) and experiment.device == "cpu"
    ):
        misfit = (
            "engine 'processes' needs device 'cpu', a strategy without exchanges in mid-round, and "
            "a model that can be pickled, hooks included"
        )
    elif experiment.engine == "barrier":
        misfit = _misfit_in_meeting(task, clients, ours=ours)
    if misfit:
        raise ValueError(f"{misfit}; choose engine 'auto' or 'loop'.")
    if experiment.diagnose:
        return "loop"
    if experiment.engine != "auto":
        return experiment.engine
    first = _first(clients)
    small = stacked.choose_size(task, first) > 1
    # One pass for all clients saves calls, which matters to small models, and exchanges. A user's
    # model may be random, or mix samples, where nobody can see it.
    if (small or task.strategy.exchanges) and ours and in_lockstep:
        return "merged"
    if small and stacked.fits(task, first):
        return "stacked"
    return "barrier" if ours and barrier.fits(task) else "loop"


def _misfit_in_lockstep(task: Task, clients: Federation, *, fits: bool, ours: bool) -> str:
    if not fits:
        return (
            "lockstep needs one step per round (dsgd), the mean as aggregator, clients that all "
            "are honest and answer, no personal tensors, no dropout layers, no clipped gradients, "
            "and all clients in every round if they have momentum"
        )
    return "" if ours else merged_batch.find_misfit(task, clients)


def _misfit_in_meeting(task: Task, clients: Federation, *, ours: bool) -> str:
    if not barrier.fits(task):
        return (
            "engine 'barrier' is for strategies with exchanges in mid-round ('fedtan'), in full "
            "precision and with device 'cpu'"
        )
    return "" if ours else barrier.find_misfit(task, _first(clients))


def _first(clients: ClientSource) -> Sequence[Batches]:
    return [clients.batches(client, 1) for client in clients.participants(1)]


def ready(
    name: str,
    experiment: Experiment,
    task: Task,
    clients: ClientSource,
    *,
    processes: int,
    conditions: Faults = NO_FAULTS,
) -> Rounds:
    """Return an engine, ready to run, with so many processes for its clients at most."""
    first = _first(clients)
    processes = min(processes, len(first))
    if name == "merged":
        return partial(merged_batch.rounds, task, clients, experiment.rounds)
    size = max(2, stacked.choose_size(task, first)) if name == "stacked" else 1
    if name == "barrier":
        together = barrier.BarrierTrainer(task, _room(), conditions.byzantine)
        engine = partial(loop.rounds, train=together.train)
    elif processes > 1:
        engine = partial(rounds_in_processes, processes=processes, cohort=size)
    else:
        cohorts = stacked.StackedTrainer(task, size, conditions.byzantine)
        engine = partial(loop.rounds, train=cohorts.train_all if size > 1 else None)
    return partial(engine, task, clients, experiment.rounds, conditions=conditions)


def _room() -> int:
    """Return how many bytes the clients of a round may hold at once."""
    free = available_memory()
    return _ROOM if free is None else min(_ROOM, free // 8)


def count_processes(
    name: str, experiment: Experiment, clients: Federation, *, free: int, step: float
) -> int:
    """Return how many processes a run with this engine should use of those that are free.

    `step` is how long one client's step took. Starting processes takes seconds, which a short run
    does not win back; the result is the same with any number of them.
    """
    if name == "processes":
        return max(1, count_cores() // experiment.threads)
    if name in ("merged", "barrier") or experiment.engine == "loop" or experiment.device != "cpu":
        return 1
    steps = sum(len(own.batch_sizes) for own in _first(clients))
    return free if step * steps * experiment.rounds > _WORTHWHILE else 1
