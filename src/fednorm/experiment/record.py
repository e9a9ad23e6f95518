"""The folder of a comparison: what was run, what came out, and what need not be run again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fednorm.experiment.config import Experiment
from fednorm.experiment.entry import OWN_SETTINGS, StrategySpec
from fednorm.experiment.load import ConfigError, build_experiment, read_toml, to_toml
from fednorm.experiment.result import Evaluation, RunResult, replace_nan

_AXES = {"strategies", "seeds"}  # a folder may grow along these


def open_folder(folder: Path, experiment: Experiment) -> None:
    """Make the folder and write config.toml; refuse a folder that holds another experiment."""
    config = folder / "config.toml"
    if config.exists():
        held = build_experiment(read_toml(config)).model_dump(exclude=_AXES)
        new = experiment.model_dump(exclude=_AXES)
        changed = sorted(key for key in new if new[key] != held[key])
        if changed:
            raise ConfigError(
                f"{str(folder)!r} holds an experiment with other values of {', '.join(changed)}; "
                "choose another --out, or start over with --fresh."
            )
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(to_toml(experiment), encoding="utf-8")


def clear_folder(folder: Path) -> None:
    """Remove what a comparison wrote, and nothing else."""
    ours = ("run.json", "metrics.jsonl", "model.safetensors", "checkpoint-*.safetensors")
    for pattern in ("config.toml", *(f"runs/*/{name}" for name in ours)):
        for path in folder.glob(pattern):
            path.unlink()


def run_folder(folder: Path, entry: StrategySpec, seed: int) -> Path:
    """Return where one run is recorded."""
    return folder / "runs" / f"{entry.folder}-seed{seed}"


_NEUTRAL = {"client_state_memory", "timeout"}  # these change no result
_VERSION = 2  # raised when the same settings give other results than before


def run_key(experiment: Experiment, entry: StrategySpec, seed: int) -> dict[str, Any]:
    """Return all that a run depends on."""
    # Runs that were recorded before there were these keys are as good as those without them.
    fields, later = Experiment.model_fields, ("diagnose", "precision", *OWN_SETTINGS)
    unused = {key for key in later if getattr(experiment, key) == fields[key].default}
    left_out = _AXES | unused | _NEUTRAL
    settings = experiment.model_dump(mode="json", exclude=left_out)
    chosen = entry.model_dump(mode="json")
    return {"version": _VERSION, "settings": settings, "strategy": chosen, "seed": seed}


def load_recorded(
    folder: Path, experiment: Experiment, entry: StrategySpec, seed: int
) -> RunResult | None:
    """Return the result of a run that was finished before with the same settings."""
    path = run_folder(folder, entry, seed) / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != run_key(experiment, entry, seed):
            return None
        values = content["result"]
        history = tuple(Evaluation.from_json(e) for e in values.pop("history"))
        diagnostics = tuple(values.pop("diagnostics", ()))
        return RunResult(**values, history=history, diagnostics=diagnostics)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or not readable: the run is made again


def save_run(folder: Path, experiment: Experiment, entry: StrategySpec, result: RunResult) -> None:
    """Record a finished or diverged run, so that it need not be made again."""
    target = run_folder(folder, entry, result.seed)
    outcome = replace_nan(asdict(result))
    content = {"key": run_key(experiment, entry, result.seed), "result": outcome}
    partial = target / "run.json.partial"
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(target / "run.json")
