"""A comparison: every strategy with every seed, in turn or several at once.

With `tune`, each strategy is compared at its best settings, chosen on validation data: every
strategy trains with every choice and the first seed, on data of which a part of the training
samples is held out, so that no client trains on them; the accuracy on that part decides. The test
samples are not used.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data import Dataset, load_dataset
from fednorm.engines.worker_process import end_repeated_import
from fednorm.errors import ConfigError
from fednorm.experiment.build import PreparedRun, clear_data_cache, load_data
from fednorm.experiment.callbacks.base import UNWATCHED, Monitor, follow
from fednorm.experiment.diagnostics import window_bytes
from fednorm.experiment.job import CheckpointPolicy, Job, execute_job, lock_folder
from fednorm.experiment.objective import ModelSource
from fednorm.experiment.prepare import find_exposure, prepare
from fednorm.experiment.process_pool import run_in_processes
from fednorm.experiment.results import Comparison, RunResult
from fednorm.experiment.run_folder import name_folder, open_folder, read_json, run_folder
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, read_toml, sweep_key
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.names import HOLD_OUT
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

    Callbacks of the experiment, and those of the monitor, follow all runs in this process.

    Up to `workers` processes share the work: several runs at once or, if fewer are left than there
    are processes, several clients of a run.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; choose a folder for the results (--out).")
    end_repeated_import()
    remove_leftovers()
    team = _Team(
        follow(experiment.callbacks, monitor), model, workers, saving or CheckpointPolicy()
    )
    first = make_validation(experiment) if experiment.tune else experiment
    checked = _check_runs(first, model, workers)
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


def load_comparison(folder: Path) -> Comparison:
    """Return the finished runs of a folder, whose experiment config.toml describes."""
    experiment = build_experiment(read_toml(folder / "config.toml"))
    if not experiment.tune:
        return _load_runs(folder, experiment)
    validation = _load_runs(folder / VALIDATION, make_validation(experiment))
    chosen = experiment if validation.missing else choose_entries(experiment, validation)
    found = _load_runs(folder, chosen)
    config = {**found.config, "tune": experiment.tune}
    return replace(found, config=config, validation=validation)


def _load_runs(folder: Path, experiment: Experiment) -> Comparison:
    pairs = [(entry, seed) for entry in experiment.strategies for seed in experiment.seeds]
    jobs = [Job(experiment, entry, seed, folder) for entry, seed in pairs]
    found = {job.name: job.find_recorded() for job in jobs}
    about = _read_record(folder)
    return Comparison(
        config=experiment.model_dump(mode="json", exclude_none=True),
        environment=about.environment,
        runs=tuple(run for run in found.values() if run is not None),
        label_counts=about.label_counts,
        missing=tuple(name for name, run in found.items() if run is None),
    )


class _Record(BaseModel):
    """What results.json tells of a comparison besides its runs."""

    environment: dict[str, str] = {}
    label_counts: tuple[tuple[NonNegativeInt, ...], ...] = ()


def _read_record(folder: Path) -> _Record:
    """Return what results.json tells of a comparison; that of a panel is in the folder above."""
    with suppress(OSError, ValueError):
        return _Record.model_validate(read_json(folder / "results.json"))
    with suppress(OSError, ValueError, TypeError, KeyError):
        for panel in read_json(folder.parent / "results.json")["panels"]:
            if name_folder(panel["title"]) == folder.name:
                return _Record.model_validate(panel)
    return _Record()


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
        monitor.skip(result)
    missing = [i for i in range(len(jobs)) if i not in done]
    at_once = max(1, min(workers, len(missing)))
    left = [replace(jobs[i], processes=workers // at_once) for i in missing]
    results = (
        _run_apart(left, at_once, monitor, model)
        if at_once > 1
        else _run_in_turn(left, monitor, model, prepared)
    )
    done |= {missing[i]: result for i, result in results}
    return tuple(done[i] for i in sorted(done))


def _run_apart(
    jobs: Sequence[Job], workers: int, monitor: Monitor, model: ModelSource | None
) -> Iterator[tuple[int, RunResult]]:
    """Run jobs in processes; a model of the user's is read from a folder with their object."""
    for i, result in run_in_processes(jobs, workers, monitor):
        folder = jobs[i].folder
        place = folder and run_folder(folder, jobs[i].entry, result.seed)
        yield i, result if model is None else result.keep_model(place, model)


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


VALIDATION = "validation"  # folder of the runs that choose


def make_validation(experiment: Experiment) -> Experiment:
    """Return the experiment that chooses: every strategy with every value, on held-out data."""
    values = experiment.model_dump(exclude={"tune"}, exclude_none=True)
    for key, choices in experiment.tune.items():
        sweep_key(values, key, choices)  # raises an error that says what is wrong
    entries = [
        entry.model_dump(exclude_defaults=True)
        for base in experiment.strategies
        for entry in list_candidates(experiment, base)
    ]
    held = {"strategies": entries, "data": _hold_out(experiment.data.model_dump())}
    return build_experiment({**values, **held, "seeds": experiment.seeds[:1]})


def _hold_out(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": HOLD_OUT, "of": dict(data)}


def list_candidates(experiment: Experiment, base: StrategySpec) -> list[StrategySpec]:
    """Return an entry for each choice of one strategy, or itself if it has none."""
    entry = base.model_dump(exclude_defaults=True)
    if "data" in entry:
        entry["data"] = _hold_out(experiment.for_entry(base).data.model_dump())
    fields = {key: value for key, value in experiment.strategy.items() if key in base.known_fields}
    values = {**experiment.model_dump(exclude={"tune"}, exclude_none=True), "strategy": fields}
    values["strategies"] = [entry]
    for key, choices in experiment.tune.items():
        table, _, field = key.partition(".")
        if table != "strategy" or field in base.known_fields:
            values = sweep_key(values, key, choices)
    return build_experiment(values).strategies


def choose_entries(experiment: Experiment, validation: Comparison) -> Experiment:
    """Return the experiment with each strategy at the choice of the highest accuracy."""
    scores = {run.strategy: _score(run) for run in validation.runs}
    chosen = []
    for base in experiment.strategies:
        best = max(list_candidates(experiment, base), key=lambda entry: scores[entry.title])
        entry = {**best.model_dump(exclude_defaults=True), "label": base.title}
        if "data" in entry:
            entry["data"] = base.settings["data"]
        chosen.append(entry)
    values = experiment.model_dump(exclude={"tune"}, exclude_none=True)
    return build_experiment({**values, "strategies": chosen})


def _score(run: RunResult) -> float:
    accuracy = run.final.accuracy if run.final and run.completed else -inf
    return accuracy if isfinite(accuracy) else -inf


SHARE, MOST = 5, 2000  # every fifth training sample is held out, at most 2000
LARGEST = 1e9  # bytes of data on disk that are used


def hold_out(of: Mapping[str, Any], seed: int) -> Dataset:
    """Return a data set whose test samples are a part of its training samples.

    They are spread evenly over the natural groups, or else over the labels.
    """
    data = load_dataset(of["name"], seed, **{k: v for k, v in of.items() if k != "name"})
    strata = data.labels() if data.groups is None else data.groups
    _, stratum, counts = np.unique(strata, return_inverse=True, return_counts=True)
    order = make_rng(seed, Stream.DOCTOR_BATCHES).permutation(len(stratum))
    order = order[np.argsort(stratum[order], kind="stable")]
    if data.on_disk:
        order = order[:: math.ceil(data.x.nbytes / LARGEST)]
    every = max(SHARE, math.ceil(len(order) / MOST))
    held = np.zeros(len(order), dtype=bool)
    held[every // 2 :: every] = counts[stratum[order[every // 2 :: every]]] > 1
    train, test = np.sort(order[~held]), np.sort(order[held])
    return replace(
        data,
        x=data.x[train],
        y=data.y[train],
        x_test=data.x[test],
        y_test=data.y[test],
        groups=None if data.groups is None else data.groups[train],
        groups_test=None if data.groups is None else data.groups[test],
        on_disk=False,
    )
