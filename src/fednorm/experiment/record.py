"""The folder of a comparison: what was run, what came out, and what need not be run again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Any

from fednorm.experiment.config import Experiment
from fednorm.experiment.entry import StrategyEntry
from fednorm.experiment.load import ConfigError, build, read, to_toml
from fednorm.experiment.result import Evaluation, RunResult, without_nan
from fednorm.experiment.run import Event, OnRound

_AXES = {"strategies", "seeds"}  # a folder may grow along these


def open_folder(folder: Path, experiment: Experiment) -> None:
    """Make the folder and write config.toml; refuse a folder that holds another experiment."""
    config = folder / "config.toml"
    if config.exists():
        held = build(read(config)).model_dump(exclude=_AXES)
        new = experiment.model_dump(exclude=_AXES)
        changed = sorted(key for key in new if new[key] != held[key])
        if changed:
            raise ConfigError(
                f"{str(folder)!r} holds an experiment with other values of {', '.join(changed)}; "
                "choose another --out, or start over with --fresh."
            )
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(to_toml(experiment), encoding="utf-8")


def clear(folder: Path) -> None:
    """Remove what a comparison wrote, and nothing else."""
    for pattern in ("config.toml", "runs/*/run.json", "runs/*/metrics.jsonl"):
        for path in folder.glob(pattern):
            path.unlink()


def run_folder(folder: Path, entry: StrategyEntry, seed: int) -> Path:
    """Return where one run is recorded."""
    return folder / "runs" / f"{entry.folder}-seed{seed}"


def _key(experiment: Experiment, entry: StrategyEntry, seed: int) -> dict[str, Any]:
    # Runs that were recorded before there were diagnostics are as good as those without.
    left_out = _AXES if experiment.diagnose else _AXES | {"diagnose"}
    settings = experiment.model_dump(mode="json", exclude=left_out)
    return {"settings": settings, "strategy": entry.model_dump(mode="json"), "seed": seed}


def recorded(
    folder: Path, experiment: Experiment, entry: StrategyEntry, seed: int
) -> RunResult | None:
    """Return the result of a run that was finished before with the same settings."""
    path = run_folder(folder, entry, seed) / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != _key(experiment, entry, seed):
            return None
        values = content["result"]
        history = tuple(_evaluation(e) for e in values.pop("history"))
        diagnostics = tuple(values.pop("diagnostics", ()))
        return RunResult(**values, history=history, diagnostics=diagnostics)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or not readable: the run is made again


def _evaluation(values: dict[str, Any]) -> Evaluation:
    per_client, loss = values.pop("per_client"), values.pop("loss")
    return Evaluation(
        **values,
        loss=nan if loss is None else loss,
        per_client=None if per_client is None else tuple(per_client),
    )


def keep(folder: Path, experiment: Experiment, entry: StrategyEntry, result: RunResult) -> None:
    """Record a finished or diverged run, so that it need not be made again."""
    target = run_folder(folder, entry, result.seed)
    outcome = without_nan(asdict(result))
    content = {"key": _key(experiment, entry, result.seed), "result": outcome}
    partial = target / "run.json.partial"
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(target / "run.json")


@contextmanager
def metrics(folder: Path, entry: StrategyEntry, seed: int) -> Iterator[OnRound]:
    """Write one line a round into metrics.jsonl."""
    target = run_folder(folder, entry, seed)
    target.mkdir(parents=True, exist_ok=True)
    with (target / "metrics.jsonl").open("w", encoding="utf-8") as file:

        def write(event: Event) -> None:
            line: dict[str, Any] = {"round": event.round, "train_loss": event.train_loss}
            if event.rejected:
                line["rejected"] = event.rejected
            if event.diagnostics is not None:
                line |= event.diagnostics
            if event.evaluation is not None:
                values = asdict(event.evaluation)
                line |= {key: value for key, value in values.items() if value is not None}
            file.write(json.dumps(without_nan(line), allow_nan=False) + "\n")
            if event.evaluation is not None:
                file.flush()

        yield write
