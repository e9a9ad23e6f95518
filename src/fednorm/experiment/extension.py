"""Train on: the runs of a folder continue to more rounds, as if these had been planned at first.

A run that is extended ends as one of all rounds would, bit by bit. So what depends on the number of
all rounds must have been the same in the rounds that are done: learning rates, and how layers are
treated. It is compared round by round, whatever settings it comes from; a run for which it differs
is refused, and the message says what to set. Evaluations keep their distance.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast, ServerState
from fednorm.errors import ConfigError
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.job import lock_folder
from fednorm.experiment.results import Evaluation, RunResult
from fednorm.experiment.run_folder import (
    check_record,
    load_recorded,
    run_folder,
    run_key,
    save_run,
)
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, read_toml, to_toml
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.system import atomic_write

# What may differ between the runs that are done and the longer ones, if it made no difference yet.
_SCHEDULE = {"rounds", "eval_every", "schedule", "milestones", "decay_every", "warmup"}
_SCHEDULE |= {"freeze_round"}
_AXES = {"strategies", "seeds"}
_SHIFT = 0.5  # of a milestone, if its share of all rounds is not exact


def extend_folder(folder: Path | None, experiment: Experiment) -> Experiment:
    """Prepare a folder so that its runs continue; return the experiment that is then run.

    Args:
        folder: of the results.
        experiment: the one it holds, with more rounds.
    """
    if folder is None or not (folder / "config.toml").is_file():
        where = "none was given" if folder is None else f"{str(folder)!r} holds no config.toml"
        raise ConfigError(f"only runs of a folder of results can be extended, but {where}.")
    with lock_folder(folder):
        held = build_experiment(read_toml(folder / "config.toml"))
        every = experiment.eval_every or held.evaluation_rounds
        new = build_experiment({**experiment.model_dump(exclude_none=True), "eval_every": every})
        if held.rounds == new.rounds:
            return new  # it was extended before
        _check_settings(folder, held, new)
        titles = {entry.title: entry for entry in held.strategies}
        entries = [(titles[e.title], e) for e in new.strategies if e.title in titles]
        if reasons := [text for old, e in entries if (text := find_obstacle(held, new, old, e))]:
            raise ConfigError("\n".join(reasons))
        runs = [
            _Run(folder, held, new, old, entry, seed)
            for old, entry in entries
            for seed in new.seeds
        ]
        reached = [run.find_state() for run in runs]
        for run, found in zip(runs, reached, strict=True):
            run.convert_state(found)
        with atomic_write(folder / "config.toml") as file:
            file.write(to_toml(new).encode())
        for run in runs:
            run.convert_result()
    return new


def _check_settings(folder: Path, held: Experiment, new: Experiment) -> None:
    """Raise ConfigError unless the experiments differ in their rounds and schedule alone."""
    if new.rounds < held.rounds:
        raise ConfigError(
            f"{str(folder)!r} holds runs of {held.rounds} rounds; extend them to more than that, "
            f"not to {new.rounds}."
        )
    if held.tune or new.tune:
        raise ConfigError(
            f"{str(folder)!r} holds strategies at settings that runs of {held.rounds} rounds chose "
            "(tune), and longer ones may choose others; name the chosen values for a new folder."
        )
    if "flower" in {held.engine, new.engine}:
        raise ConfigError(
            "runs on Flower's nodes cannot be extended: nodes forget what they keep for a run when "
            "it ends; use another engine."
        )
    if held.privacy or new.privacy:
        raise ConfigError(
            "private runs cannot be extended: their noise belongs to the planned rounds, since "
            "equal noise in two runs would cancel; make a new run."
        )
    old, now = (_leave_out(e.model_dump(exclude=_AXES), _SCHEDULE) for e in (held, new))
    changed = sorted(key for key in now if now[key] != old.get(key))
    changed += [] if new.evaluation_rounds == held.evaluation_rounds else ["eval_every"]
    if changed:
        raise ConfigError(
            f"{str(folder)!r} holds an experiment with other values of {', '.join(changed)}: runs "
            "can be extended with the settings that they have; choose another folder."
        )


def _leave_out(settings: Any, keys: set[str]) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {k: _leave_out(value, keys) for k, value in settings.items() if k not in keys}


def find_obstacle(
    held: Experiment, new: Experiment, old_entry: StrategySpec, entry: StrategySpec
) -> str | None:
    """Return why the runs of a strategy cannot be extended, and what to set, or None."""
    title = f"{entry.title} cannot be extended"
    if "rounds" in entry.settings:
        return f"{title}: it sets rounds for itself; change its table, in a new folder."
    before, after = held.for_entry(old_entry), new.for_entry(entry)
    plain = [_leave_out(e.model_dump(), _SCHEDULE) for e in (old_entry, entry)]
    if plain[0] != plain[1]:
        return f"{title}: its other settings are not those of the runs in the folder."
    (treated, rated), (treats, rates) = _list_rules(before, old_entry), _list_rules(after, entry)
    for number in range(1, before.rounds + 1):
        if rated(number) != rates(number):
            return f"{title}: {_explain_rate(before, after)}"
        if treated(number) != treats(number):
            return f"{title}: {_explain_rule(before, after, old_entry, number)}"
    return None


def _list_rules(experiment: Experiment, entry: StrategySpec) -> tuple[Any, Any]:
    """Return functions of the round: how layers are treated in it, and its learning rate."""
    strategy, rounds = experiment.make_strategy(entry), experiment.rounds
    algorithm: Any = experiment.make_algorithm(strategy)
    start = ServerState(round=0, weights={}, buffers={}, running={})

    def treat(number: int) -> tuple[Any, bool]:
        received = Broadcast(replace(start, round=number - 1), rounds)
        return _describe_rule(strategy.rule(received)), strategy.trains_affine(received)

    return treat, lambda number: algorithm.rate(number, rounds)


def _describe_rule(rule: NormRule) -> tuple[Any, ...]:
    """Return what is equal for equal rules, though a function with fixed arguments is made anew."""
    function = rule.normalize
    if isinstance(function, partial):
        made = (function.func, function.args, function.keywords)
        return rule.normalize_with, rule.tracks, rule.reports, *made
    return rule.normalize_with, rule.tracks, rule.reports, function


def _explain_rate(before: Experiment, after: Experiment) -> str:
    """Say which schedule has the learning rates of the rounds that are done."""
    old, new = before.rounds, after.rounds
    algorithm: Any = before.make_algorithm()
    if algorithm.schedule != "step":
        return "its learning rates would have been different; leave the schedule as it was."
    falls = [int(share * old) for share in algorithm.milestones]
    shares = [f"{_find_share(last, new):g}" for last in falls]
    where = " and ".join(map(str, falls))
    return (
        f"its learning rate fell after rounds {where} of {old}, shares of all rounds that are "
        f"others of {new}; keep them with --set algorithm.milestones=[{','.join(shares)}]"
    )


def _find_share(last: int, rounds: int) -> float:
    share = last / rounds
    exact = share * rounds == last and float(f"{share:g}") == share
    return share if exact else (last + _SHIFT) / rounds


def _explain_rule(before: Experiment, after: Experiment, entry: StrategySpec, number: int) -> str:
    """Say which settings treat layers as in the rounds that are done."""
    share = getattr(before.make_strategy(entry), "freeze_round", None)
    if not isinstance(share, float):
        return f"layers would have been treated differently in round {number}; make a new run."
    last = int(share * before.rounds + 0.5)
    would = int(share * after.rounds + 0.5)
    key = "freeze_round in its table to" if "freeze_round" in entry.fields else ""
    how = f"set {key} {last}" if key else f"keep it with --set strategy.freeze_round={last}"
    return (
        f"statistics freeze after {share:g} of all rounds, which was round {last} of "
        f"{before.rounds} and would be round {would} of {after.rounds}; {how}"
    )


@dataclass(frozen=True)
class _Run:
    """One run of the folder, before and after."""

    folder: Path
    held: Experiment
    new: Experiment
    old_entry: StrategySpec
    entry: StrategySpec
    seed: int

    @property
    def target(self) -> Path:
        return run_folder(self.folder, self.entry, self.seed)

    @property
    def metrics(self) -> Path:
        return self.target / "metrics.jsonl"

    @property
    def recorded(self) -> RunResult | None:
        return load_recorded(self.folder, self.held, self.old_entry, self.seed)

    def find_state(self) -> Checkpoint | None:
        """Return where the run is; None if it has ended for good, or has not begun."""
        result = self.recorded
        if result and result.status != "finished":
            return None
        key = run_key(self.held, self.old_entry, self.seed)
        found, _ = checkpoint.load_newest(self.target, key, check=check_record)
        if result and (found is None or found.state.round != result.rounds):
            raise ConfigError(
                f"{self.entry.title} seed {self.seed} cannot be extended: the state of its last "
                "round was not kept, as it is large or an older fednorm made the run; runs keep "
                "it with --keep-state."
            )
        if result and found:
            _read_metrics(self.metrics, found.state.round)  # before anything changes
        return found

    def convert_state(self, found: Checkpoint | None) -> None:
        """Save the state as one of the longer run: without an evaluation that only ended it."""
        if found is None:
            return
        old, entry = self.held.for_entry(self.old_entry), self.old_entry
        record, number = dict(found.record), found.state.round
        if number == old.rounds and number % old.evaluation_rounds:
            record["history"] = [e for e in record["history"] if e["round"] != number]
            record["diagnostics"] = [
                values | ({"gradient_deviation": None} if place == number else {})
                for place, values in enumerate(record["diagnostics"], start=1)
            ]
            _drop_evaluation(self.metrics, number)
        if number == old.rounds and record["frozen_from"] is None:
            record["frozen_from"] = _find_frozen(old, entry, found.state)
        key = run_key(self.new, self.entry, self.seed)
        checkpoint.save_checkpoint(self.target, key, replace(found, record=record))

    def convert_result(self) -> None:
        """Keep the result of a run that would have ended in the same round."""
        result = self.recorded
        if result and result.status != "finished":
            save_run(self.folder, self.new, self.entry, result)


def _find_frozen(experiment: Experiment, entry: StrategySpec, state: ServerState) -> int | None:
    """Return the next round if statistics are frozen in it, for the first time."""
    rule, rounds = experiment.make_strategy(entry).rule, experiment.rounds
    first = replace(state, round=0, strategy_state={})
    next_one, start = rule(Broadcast(state, rounds)), rule(Broadcast(first, rounds))
    frozen = [r.normalize_with == "shared" and r.reports == "nothing" for r in (start, next_one)]
    return state.round + 1 if frozen == [False, True] else None


def _read_metrics(path: Path, number: int) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of metrics.jsonl, and the values of a round."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return lines, dict(json.loads(lines[number - 1]))
    except (OSError, ValueError, TypeError, IndexError, RecursionError):
        raise ConfigError(
            f"the run cannot be extended, as {str(path)!r} has no line of round {number} that can "
            "be read; make it again in a new folder."
        ) from None


def _drop_evaluation(path: Path, number: int) -> None:
    """Take the evaluation out of a line of metrics.jsonl."""
    lines, values = _read_metrics(path, number)
    tested = {field.name for field in fields(Evaluation)} - {"round", "train_loss"}
    values = {key: value for key, value in values.items() if key not in tested}
    values |= {"gradient_deviation": None} if "gradient_deviation" in values else {}
    lines[number - 1] = json.dumps(values)
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
