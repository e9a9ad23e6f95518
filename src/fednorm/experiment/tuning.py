"""Each strategy at its best settings, chosen on validation data.

Every strategy trains with every choice of `tune` and the first seed, on data of which a part of the
training samples is held out; the accuracy on that part decides. The test samples are not used.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from fednorm.data.held_out import hold_out
from fednorm.experiment.results import Comparison, RunResult
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, sweep_key
from fednorm.experiment.schema.specs import StrategySpec

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
    return {"name": f"{hold_out.__module__}:{hold_out.__name__}", "of": dict(data)}


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
    accuracy = run.final.accuracy if run.final and run.status == "finished" else -1.0
    return accuracy if isfinite(accuracy) else -1.0
