"""A comparison: every strategy with every seed, in turn or several at once."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from fednorm.engines.worker_process import end_repeated_import
from fednorm.errors import ConfigError
from fednorm.experiment.build import PreparedRun, clear_data_cache, load_data
from fednorm.experiment.diagnostics import window_bytes
from fednorm.experiment.job import CheckpointPolicy, Job, execute_job, lock_folder
from fednorm.experiment.model_object import ModelSource
from fednorm.experiment.prepare import find_exposure, prepare
from fednorm.experiment.process_pool import run_in_processes
from fednorm.experiment.results import Comparison, Event, RunResult
from fednorm.experiment.run import UNWATCHED, Monitor
from fednorm.experiment.run_folder import open_folder
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.tuning import VALIDATION, choose_entries, make_validation
from fednorm.system import (
    MemoryEstimate,
    describe_environment,
    limit_threads,
    measure_peak,
    remove_leftovers,
)

log = logging.getLogger("fednorm.conversion")
warnings = logging.getLogger("fednorm")

# Bytes of prepared runs that are held until they run. Every strategy is checked before the first
# run; holding all of a large comparison would cost memory that the runs need, so those beyond this
# limit are prepared again. The memory check counts a held run twice, which is on the safe side.
_HELD = 500_000_000

# Prepared runs by the names of their jobs, and the clients' numbers of labels.
Checked: TypeAlias = tuple[dict[str, PreparedRun], tuple[tuple[int, ...], ...]]


def run_comparison(
    experiment: Experiment,
    *,
    folder: Path | None = None,
    monitor: Monitor = UNWATCHED,
    model: ModelSource | None = None,
    workers: int = 1,
    saving: CheckpointPolicy | None = None,
) -> Comparison:
    """Run every strategy with every seed.

    With `folder`, each run is recorded there: runs that it already holds are not repeated, and one
    that was stopped or killed resumes from its last checkpoint. Everything is checked before the
    first run starts. Ctrl-C ends the comparison with the runs that are done.

    Up to `workers` processes share the work: several runs at once or, if fewer are left than there
    are processes, several clients of a run.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; choose a folder for the results (--out).")
    end_repeated_import()
    remove_leftovers()
    team = _Team(monitor, model, workers, saving or CheckpointPolicy())
    first = make_validation(experiment) if experiment.tune else experiment
    checked = _check_runs(first, model, workers)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if folder is None else lock_folder(folder):
        if folder is not None:
            open_folder(folder, experiment)
        if not experiment.tune:
            return team.run(experiment, folder, checked)
        validation = team.run(first, folder and folder / VALIDATION, checked)
        if any(run.status == "interrupted" for run in validation.runs):
            return validation
        chosen = choose_entries(experiment, validation)
        found = team.run(chosen, folder, _check_runs(chosen, model, workers))
        return replace(
            found, config={**found.config, "tune": experiment.tune}, validation=validation
        )


@dataclass(frozen=True)
class _Team:
    """How runs are made: watched by a monitor, by several processes."""

    monitor: Monitor
    model: ModelSource | None
    workers: int
    saving: CheckpointPolicy

    def run(self, experiment: Experiment, folder: Path | None, checked: Checked) -> Comparison:
        """Make all runs of an experiment that the folder does not hold."""
        prepared, counts = checked
        jobs = [
            Job(experiment, entry, seed, folder, self.saving)
            for entry in experiment.strategies
            for seed in experiment.seeds
        ]
        try:
            runs = _collect_results(jobs, self.monitor, self.model, self.workers, prepared)
        finally:
            clear_data_cache()  # a user's own data may be other ones the next time
        config = experiment.model_dump(mode="json", exclude_none=True)
        return Comparison(config, describe_environment(), runs, counts)


_SUMS_ALONE = (
    "secure = true: the server uses sums over clients alone. What looks at single replies is off: "
    "outlier_factor, limits of claims, and results of single clients."
)


def _check_runs(experiment: Experiment, model: ModelSource | None, workers: int) -> Checked:
    """Try one step of every strategy, and whether the runs fit into memory.

    Return the runs with the first seed that this process will make, by the names of their jobs, and
    the clients' numbers of labels, unless a run may not publish results of single clients.
    """
    needs = MemoryEstimate(limit=round(experiment.client_state_memory * 1e9))
    at_once = min(workers, len(experiment.strategies) * len(experiment.seeds))
    most, held, kept = 1, 0, dict[str, PreparedRun]()
    secure, private, exposed = False, False, ""
    counts = set[tuple[tuple[int, ...], ...]]()  # one, unless entries have different clients
    for entry in experiment.strategies:
        with measure_peak() as found, limit_threads(experiment.threads):
            prepared = prepare(experiment, entry, experiment.seeds[0], model)
        news = prepared.bytes_per_round() + window_bytes(prepared)
        needs.add(found.bytes, prepared.kept * prepared.experiment.clients, news)
        most = max(most, prepared.count_workers(workers // at_once))
        if notes := prepared.task.conversion_notes:
            log.info("%s: %s", entry.title, "; ".join(notes))
        secure = secure or prepared.task.secure
        private = private or prepared.task.privacy is not None
        counts.add(prepared.federation.count_labels())
        if not exposed and (exposed := find_exposure(prepared) or ""):
            warnings.warning("%s: %s", entry.title, exposed)
        held += _count_bytes(prepared)
        if at_once == 1 and held <= _HELD:
            kept[Job(experiment, entry, prepared.seed).name] = prepared
        del prepared
    if secure:
        log.info(_SUMS_ALONE)
    needs.check(at_once * most)
    return kept, () if secure or private or len(counts) > 1 else counts.pop()


def _count_bytes(prepared: PreparedRun) -> int:
    """Return the bytes that a prepared run holds besides the data that all runs share."""
    shared = load_data(prepared.experiment, prepared.seed)
    own = prepared.federation
    pairs = ((own.data.x, shared.x), (own.x_test, shared.x_test))
    data = sum(mine.nbytes for mine, theirs in pairs if mine is not theirs)
    model = sum(tensor.nbytes for tensor in prepared.task.model.state_dict().values())
    return int(data + 2 * model)  # the workspace, and the initial state


def _collect_results(
    jobs: Sequence[Job],
    monitor: Monitor,
    model: ModelSource | None,
    workers: int,
    prepared: dict[str, PreparedRun],
) -> tuple[RunResult, ...]:
    known = [job.find_recorded(model) for job in jobs]
    done = {i: result for i, result in enumerate(known) if result is not None}
    for i, result in done.items():
        prepared.pop(jobs[i].name, None)
        monitor.report(
            Event(result.strategy, result.seed, result.rounds, 0.0, evaluation=result.final)
        )
    missing = [i for i in range(len(jobs)) if i not in done]
    at_once = max(1, min(workers, len(missing)))
    left = [replace(jobs[i], processes=workers // at_once) for i in missing]
    results = (
        run_in_processes(left, at_once, monitor)
        if at_once > 1
        else _run_in_turn(left, monitor, model, prepared)
    )
    done |= {missing[i]: result for i, result in results}
    return tuple(done[i] for i in sorted(done))


def _run_in_turn(
    jobs: Sequence[Job],
    monitor: Monitor,
    model: ModelSource | None,
    prepared: dict[str, PreparedRun],
) -> Iterator[tuple[int, RunResult]]:
    for i, job in enumerate(jobs):
        result = execute_job(job, monitor, model, prepared.pop(job.name, None))
        yield i, result
        if result.status == "interrupted":
            return
