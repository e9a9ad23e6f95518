"""Which engine runs an experiment: the one that was asked for, or the fastest that is exact."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from fednorm.core.messages import Batches
from fednorm.core.task import Task
from fednorm.data.federation import Federation
from fednorm.engines import cohort, lockstep, meeting, simulate, workers
from fednorm.engines.clients import Clients
from fednorm.engines.conditions import USUAL, Conditions
from fednorm.engines.simulate import Round, Start
from fednorm.experiment.config import Experiment
from fednorm.experiment.memory import available
from fednorm.system import count_cores

Rounds: TypeAlias = Callable[[Start | None], Iterator[Round]]
_ROOM = 2_000_000_000  # bytes that clients may hold while they wait for each other
_WORTHWHILE = 20.0  # seconds of training, above which it pays to start processes


def choose(
    experiment: Experiment,
    task: Task,
    clients: Federation,
    *,
    ours: bool,
    conditions: Conditions = USUAL,
) -> str:
    """Return the name of the engine; raise ValueError if the one asked for does not fit.

    The choice depends on the experiment alone, never on the machine: engines differ in rounding.
    """
    in_lockstep = lockstep.fits(task, clients, conditions)
    misfit = ""
    if experiment.engine == "lockstep":
        misfit = _misfit_in_lockstep(task, clients, fits=in_lockstep, ours=ours)
    elif experiment.engine == "cohort":
        misfit = cohort.find_misfit(task, _first(clients))
    elif experiment.engine == "workers" and not (workers.fits(task) and experiment.device == "cpu"):
        misfit = (
            "engine 'workers' needs device 'cpu', a strategy without exchanges in mid-round, and a "
            "model that can be pickled, hooks included"
        )
    elif experiment.engine == "meeting":
        misfit = _misfit_in_meeting(task, clients, ours=ours)
    if misfit:
        raise ValueError(f"{misfit}; choose engine 'auto' or 'loop'.")
    if experiment.diagnose:
        return "loop"
    if experiment.engine != "auto":
        return experiment.engine
    first = _first(clients)
    small = cohort.size(task, first) > 1
    # One pass for all clients saves calls, which matters to small models, and exchanges. A user's
    # model may be random, or mix samples, where nobody can see it.
    if (small or task.strategy.exchanges) and ours and in_lockstep:
        return "lockstep"
    if small and cohort.fits(task, first):
        return "cohort"
    return "meeting" if ours and meeting.fits(task) else "loop"


def _misfit_in_lockstep(task: Task, clients: Federation, *, fits: bool, ours: bool) -> str:
    if not fits:
        return (
            "lockstep needs one step per round (dsgd), the mean as aggregator, clients that all "
            "are honest and answer, no personal tensors, no dropout layers, no clipped gradients, "
            "and all clients in every round if they have momentum"
        )
    return "" if ours else lockstep.find_misfit(task, clients)


def _misfit_in_meeting(task: Task, clients: Federation, *, ours: bool) -> str:
    if not meeting.fits(task):
        return (
            "engine 'meeting' is for strategies with exchanges in mid-round ('fedtan'), in full "
            "precision and with device 'cpu'"
        )
    return "" if ours else meeting.find_misfit(task, _first(clients))


def _first(clients: Clients) -> Sequence[Batches]:
    return [clients.batches(client, 1) for client in clients.participants(1)]


def ready(
    name: str,
    experiment: Experiment,
    task: Task,
    clients: Clients,
    *,
    processes: int,
    conditions: Conditions = USUAL,
) -> Rounds:
    """Return an engine, ready to run, with so many processes for its clients at most."""
    first = _first(clients)
    processes = min(processes, len(first))
    if name == "lockstep":
        return partial(lockstep.rounds, task, clients, experiment.rounds)
    size = max(2, cohort.size(task, first)) if name == "cohort" else 1
    if name == "meeting":
        together = meeting.Meeting(task, _room(), conditions.byzantine)
        engine = partial(simulate.rounds, train=together.train)
    elif processes > 1:
        engine = partial(workers.rounds, processes=processes, cohort=size)
    else:
        cohorts = cohort.Cohorts(task, size, conditions.byzantine)
        engine = partial(simulate.rounds, train=cohorts.train_all if size > 1 else None)
    return partial(engine, task, clients, experiment.rounds, conditions=conditions)


def _room() -> int:
    """Return how many bytes the clients of a round may hold at once."""
    free = available()
    return _ROOM if free is None else min(_ROOM, free // 8)


def processes(
    name: str, experiment: Experiment, clients: Federation, *, free: int, step: float
) -> int:
    """Return how many processes a run with this engine should use of those that are free.

    `step` is how long one client's step took. Starting processes takes seconds, which a short run
    does not win back; the result is the same with any number of them.
    """
    if name == "workers":
        return max(1, count_cores() // experiment.threads)
    if name in ("lockstep", "meeting") or experiment.engine == "loop" or experiment.device != "cpu":
        return 1
    steps = sum(len(own.lengths) for own in _first(clients))
    return free if step * steps * experiment.rounds > _WORTHWHILE else 1
