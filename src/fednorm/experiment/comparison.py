"""Strategies side by side: every strategy with every seed, in turn or several at once."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from fednorm.experiment.build import ModelSource, clear_data_cache
from fednorm.experiment.config import Experiment
from fednorm.experiment.diagnostics import window_bytes
from fednorm.experiment.job import CheckpointPolicy, Job, execute_job, lock_folder
from fednorm.experiment.prepare import prepare
from fednorm.experiment.process_pool import run_in_processes
from fednorm.experiment.results import Comparison, RunResult
from fednorm.experiment.run import Event, OnRound
from fednorm.experiment.run_folder import open_folder
from fednorm.system import MemoryEstimate, describe_environment, measure_peak


def run_comparison(
    experiment: Experiment,
    *,
    folder: Path | None = None,
    on_round: OnRound = lambda _: None,
    model: ModelSource | None = None,
    workers: int = 1,
    saving: CheckpointPolicy | None = None,
) -> Comparison:
    """Run every strategy with every seed.

    With a folder, each run is recorded there: runs that it already holds are not repeated, and one
    that was stopped or killed goes on from its last checkpoint. Everything is checked before the
    first run starts. Ctrl-C ends the comparison with what it has.

    Up to `workers` processes share the work: several runs at once or, where fewer are left than
    there are processes, several clients of a run.
    """
    _check_runs(experiment, model, workers)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if folder is None else lock_folder(folder):
        if folder is not None:
            open_folder(folder, experiment)
        jobs = [
            Job(experiment, entry, seed, folder, saving or CheckpointPolicy())
            for entry in experiment.strategies
            for seed in experiment.seeds
        ]
        try:
            runs = _collect_results(jobs, on_round, model, workers)
        finally:
            clear_data_cache()  # a user's own data may be other ones the next time
    return Comparison(
        experiment.model_dump(mode="json", exclude_none=True), describe_environment(), runs
    )


def _check_runs(experiment: Experiment, model: ModelSource | None, workers: int) -> None:
    """Try one step of every strategy, and whether the runs will fit into memory."""
    needs = MemoryEstimate(limit=round(experiment.client_state_memory * 1e9))
    at_once = min(workers, len(experiment.strategies) * len(experiment.seeds))
    most = 1
    for entry in experiment.strategies:
        with measure_peak() as found:
            prepared = prepare(experiment, entry, experiment.seeds[0], model)
        news = prepared.bytes_per_round() + window_bytes(prepared)
        needs.add(found.bytes, prepared.kept * experiment.clients, news)
        most = max(most, prepared.count_workers(workers // at_once))
    needs.check(at_once * most)


def _collect_results(
    jobs: Sequence[Job], on_round: OnRound, model: ModelSource | None, workers: int
) -> tuple[RunResult, ...]:
    known = [None if model is not None else job.find_recorded() for job in jobs]
    done = {i: result for i, result in enumerate(known) if result is not None}
    for result in done.values():
        on_round(Event(result.strategy, result.seed, result.rounds, 0.0, evaluation=result.final))
    missing = [i for i in range(len(jobs)) if i not in done]
    at_once = max(1, min(workers, len(missing)))
    left = [replace(jobs[i], processes=workers // at_once) for i in missing]
    results = (
        run_in_processes(left, at_once, on_round)
        if at_once > 1
        else _run_in_turn(left, on_round, model)
    )
    done |= {missing[i]: result for i, result in results}
    return tuple(done[i] for i in sorted(done))


def _run_in_turn(
    jobs: Sequence[Job], on_round: OnRound, model: ModelSource | None
) -> Iterator[tuple[int, RunResult]]:
    for i, job in enumerate(jobs):
        result = execute_job(job, on_round, model)
        yield i, result
        if result.status == "interrupted":
            return
