"""The folder of a comparison: its configuration, and the files of each run."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fednorm.core.messages import RejectedReply
from fednorm.engines.base import RoundResult
from fednorm.errors import ConfigError
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.results import Event, RunRecorder, RunResult, replace_nan
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, read_toml, to_toml
from fednorm.experiment.schema.specs import OWN_SETTINGS, StrategySpec
from fednorm.experiment.trained_model import CLIENT_FILES, MODEL_FILE
from fednorm.system import atomic_write

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
    """Remove the files of a comparison, and nothing else."""
    ours = ("run.json", "metrics.jsonl", MODEL_FILE, "checkpoint-*.safetensors", CLIENT_FILES)
    for pattern in ("config.toml", *(f"runs/*/{name}" for name in ours)):
        for path in folder.glob(pattern):
            path.unlink()


def run_folder(folder: Path, entry: StrategySpec, seed: int) -> Path:
    """Return the folder of one run."""
    return folder / "runs" / f"{entry.folder}-seed{seed}"


_NEUTRAL = {"client_state_memory", "timeout"}  # these change no result
_VERSION = 2  # raised when the same settings give other results than before


def run_key(experiment: Experiment, entry: StrategySpec, seed: int) -> dict[str, Any]:
    """Return all that a run depends on."""
    # Runs recorded before these keys existed are equal to runs that leave them at their defaults.
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
        return RunResult.from_json(content["result"]).keep_model(path.parent)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or not readable: the run is made again


def save_run(folder: Path, experiment: Experiment, entry: StrategySpec, result: RunResult) -> None:
    """Record a finished or diverged run, so that it need not be made again."""
    target = run_folder(folder, entry, result.seed)
    outcome = replace_nan(asdict(result))
    content = {"key": run_key(experiment, entry, result.seed), "result": outcome}
    with atomic_write(target / "run.json") as file:
        file.write(json.dumps(content).encode())


CHECKPOINT_SECONDS = 10.0  # between checkpoints, unless their distance is given in rounds


class MetricsFile:
    """The file metrics.jsonl: one line a round."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+", encoding="utf-8")

    def truncate(self, rounds: int) -> bool:
        """Keep the lines of the first rounds; return False if some of them are missing."""
        self.file.seek(0)
        for _ in range(rounds):
            if not self.file.readline().endswith("\n"):
                return False
        self.file.truncate(self.file.tell())
        return True

    def write(self, event: Event) -> None:
        """Add a round."""
        line: dict[str, Any] = {"round": event.round, "train_loss": event.train_loss}
        if event.rejected:
            line["rejected"] = [_describe_rejected(one) for one in event.rejected]
        counts = {"dropped_out": event.dropped_out, "retries": event.retries}
        line |= {key: count for key, count in counts.items() if count}
        if event.diagnostics is not None:
            line |= event.diagnostics
        if event.evaluation is not None:
            values = asdict(event.evaluation)
            line |= {key: value for key, value in values.items() if value is not None}
        self.file.write(json.dumps(replace_nan(line), allow_nan=False) + "\n")
        if event.evaluation is not None:
            self.file.flush()


def _describe_rejected(rejected: RejectedReply) -> dict[str, Any]:
    where = {"layer": rejected.where} if rejected.where else {}
    return {"client": rejected.client, **where, "reason": rejected.reason}


@dataclass
class RunCheckpointer:
    """Writes checkpoints of one run into its folder."""

    folder: Path
    key: Mapping[str, Any]  # of which run they are
    metrics: MetricsFile
    every: int | None = None  # rounds between checkpoints; by the clock if none
    last: float = field(default_factory=time.monotonic)
    reached: RoundResult | Checkpoint | None = None  # how far the run is

    def start(
        self, device: torch.device | str, check: Callable[[Checkpoint], None] | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return where the run stopped, if it did, and messages about damaged checkpoints."""
        found, messages = checkpoint.load_newest(self.folder, self.key, device, check)
        if found and self.metrics.truncate(found.state.round):
            self.reached = found
            return found, messages
        self.metrics.truncate(0)
        return None, messages

    def after(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Save if it is time."""
        self.reached = result
        by_clock = time.monotonic() - self.last > CHECKPOINT_SECONDS
        if by_clock if self.every is None else result.state.round % self.every == 0:
            self.save(result, recorder)

    def save(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Save now."""
        self.metrics.file.flush()
        found = Checkpoint(result.state, result.client_states, recorder.record(), recorder.window)
        checkpoint.save_checkpoint(self.folder, self.key, found)
        self.last = time.monotonic()
