"""The folder of a comparison: its configuration, and the files of each run."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from fednorm.core.messages import RejectedReply
from fednorm.engines.base import RoundResult
from fednorm.errors import ConfigError, DiskError
from fednorm.experiment import checkpoint
from fednorm.experiment.callbacks import may_end_runs
from fednorm.experiment.checkpoint import Checkpoint, RunRecorder
from fednorm.experiment.results import Event, RunResult, Status, replace_nan
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, read_toml, to_toml
from fednorm.experiment.schema.specs import THREATS, StrategySpec
from fednorm.experiment.trained_model import CLIENT_FILES, MODEL_FILE
from fednorm.objects import OBJECT
from fednorm.system import atomic_write, explain_full_disk, open_regular

log = logging.getLogger("fednorm")

RESULTS = Path("results")
_AXES = {"strategies", "seeds"}  # a folder may grow along these
_NEUTRAL = {"client_state_memory", "timeout"}  # these change no result
_LATER = ("diagnose", "precision", "tune", "loss", "metrics", *THREATS)
_UNNAMED = _AXES | _NEUTRAL
_LONGEST = 120  # characters of a folder's name


def choose_folder(
    experiment: Experiment,
    base: str = "compare",
    *,
    reference: Experiment | None = None,
    root: Path = RESULTS,
) -> Path:
    """Return the folder of an experiment below `root`: the one that holds it, or a new one.

    Its name is `base` with what differs from the reference, or from the defaults.

    >>> choose_folder(Experiment(partition="iid", clients=20)).as_posix()
    'results/compare-iid-clients=20'
    """
    plain = _dump_identity(reference or Experiment(), _UNNAMED)
    parts = _list_differences(_dump_identity(experiment, _UNNAMED), plain)
    name = name_folder("-".join([base, *parts]))
    numbered = (root / (f"{name}-{n}" if n > 1 else name) for n in count(1))
    return next(folder for folder in numbered if _may_hold(folder, experiment))


def _dump_identity(experiment: Experiment, exclude: set[str]) -> dict[str, Any]:
    """Return the settings by which experiments differ; callbacks count that may end runs."""
    settings = experiment.model_dump(mode="json", exclude=exclude | {"callbacks"})
    deciding = [c.model_dump(mode="json") for c in experiment.callbacks if may_end_runs(c.name)]
    return {**settings, "callbacks": deciding} if deciding else settings


def _list_differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        if isinstance(value, Mapping):
            inner = _list_differences(value, before if isinstance(before, Mapping) else {})
            yield from (f"tune-{part}" for part in inner) if key == "tune" else inner
        elif key == "callbacks":
            yield from (part for one in value for part in _list_differences(one, {}))
        elif key != "root":  # a path says little about an experiment
            word = "-".join(map(str, value)) if isinstance(value, list) else str(value)
            yield word if key in {"name", "partition"} else f"{key}={word}"


def _may_hold(folder: Path, experiment: Experiment) -> bool:
    try:
        return not _list_changes(folder, experiment)
    except ConfigError:  # of a config that this version cannot read
        return False


def name_folder(text: str) -> str:
    """Return text as the name of a folder.

    >>> name_folder("(d) E = 100")
    'd_E_=_100'
    """
    name = re.sub(r"[^\w.=-]+", "_", text)[:_LONGEST].strip("_")
    return name if name.strip(".") else "_"  # ".." is another folder


def link_latest(folder: Path, root: Path = RESULTS) -> None:
    """Let `root/latest` lead to a folder of `root`; a system without links has none."""
    link = root / "latest"
    if folder.parent != root or folder == link or (link.exists() and not link.is_symlink()):
        return
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name, target_is_directory=True)


def open_folder(folder: Path, experiment: Experiment) -> None:
    """Make the folder and write config.toml; refuse a folder that holds another experiment."""
    if changed := _list_changes(folder, experiment):
        extends = set(changed) <= {"rounds", "eval_every"} and "rounds" in changed
        more = f"; to train on, fednorm run {folder} --extend {experiment.rounds}"
        raise ConfigError(
            f"{str(folder)!r} holds an experiment with other values of {', '.join(changed)}; "
            "choose another --out, or none, which finds a free folder, or start over with "
            f"--fresh{more if extends else ''}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "config.toml") as file:  # an empty one is another experiment
        file.write(to_toml(experiment).encode())


def _list_changes(folder: Path, experiment: Experiment) -> list[str]:
    """Return the keys in which an experiment differs from the one that a folder holds."""
    config = folder / "config.toml"
    if not config.exists():
        return []
    values = read_toml(config)
    entries = values.get("strategies")
    if isinstance(entries, list):  # objects of an earlier session are not compared, nor known here
        known = [entry for entry in entries if not _name_entry(entry).startswith(OBJECT)]
        values["strategies"] = known or ["naive"]
    held = _dump_identity(build_experiment(values), _AXES)
    new = _dump_identity(experiment, _AXES)
    return sorted(key for key in {**held, **new} if new.get(key) != held.get(key))


def _name_entry(entry: Any) -> str:
    return str(entry.get("name") if isinstance(entry, Mapping) else entry)


def clear_folder(folder: Path) -> None:
    """Remove the files of a comparison, and nothing else."""
    ours = ("run.json", "metrics.jsonl", MODEL_FILE, "checkpoint-*.safetensors", CLIENT_FILES)
    for pattern in ("config.toml", *(f"runs/*/{name}" for name in ours)):
        for path in folder.glob(pattern):
            path.unlink()


def run_folder(folder: Path, entry: StrategySpec, seed: int) -> Path:
    """Return the folder of one run."""
    return folder / "runs" / f"{entry.folder}-seed{seed}"


_VERSION = 2  # raised when the same settings give other results than before


def run_key(experiment: Experiment, entry: StrategySpec, seed: int) -> dict[str, Any]:
    """Return all that a run depends on."""
    # Runs recorded before these keys existed are equal to runs that leave them at their defaults.
    fields, later = Experiment.model_fields, _LATER
    unused = {key for key in later if getattr(experiment, key) == fields[key].default}
    left_out = _AXES | unused | _NEUTRAL
    settings = _dump_identity(experiment, left_out)
    chosen = entry.model_dump(mode="json")
    return {"version": _VERSION, "settings": settings, "strategy": chosen, "seed": seed}


def load_recorded(
    folder: Path, experiment: Experiment, entry: StrategySpec, seed: int
) -> RunResult | None:
    """Return the result of a run that was finished before with the same settings."""
    path = run_folder(folder, entry, seed) / "run.json"
    try:
        content = read_json(path)
        if content["key"] != run_key(experiment, entry, seed):
            return None
        result = RunResult.from_json(content["result"])
        check_types(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, or not readable: the run is made again
    return result.keep_model(path.parent) if _is_of(result, entry, seed) else None


def _is_of(result: RunResult, entry: StrategySpec, seed: int) -> bool:
    return (result.strategy, result.seed) == (entry.title, seed)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise OSError or ValueError if there is none."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except RecursionError:
        raise ValueError(f"{path} has more nested parts than JSON of ours.") from None


def check_types(result: RunResult) -> None:
    """Raise ValueError unless a result that was read has values of the declared types."""
    _make_adapter().validate_json(json.dumps(asdict(result)), strict=True)


@cache
def _make_adapter() -> TypeAdapter[RunResult]:
    return TypeAdapter(RunResult)


def check_record(found: Checkpoint) -> None:
    """Raise an error unless a checkpoint has recorded its rounds."""
    recorder = RunRecorder.read(found.record)
    if len(recorder.exchanges) != found.state.round:
        raise ValueError("the checkpoint has not recorded its rounds.")
    check_types(recorder.result("stopped", strategy="", seed=0))


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
        self.folder = path.parent
        with explain_full_disk(self.folder):
            self.file = path.open("a+", encoding="utf-8")

    def truncate(self, rounds: int) -> bool:
        """Keep the lines of the first rounds; return False if some of them are missing."""
        self.file.seek(0)
        for _ in range(rounds):
            if not self.file.readline().endswith("\n"):
                return False
        self.file.truncate(self.file.tell())
        return True

    def on_round(self, event: Event) -> None:
        """Add a round."""
        try:
            self.write(event)
        except OSError as error:
            text = f"{self.file.name!r} cannot be written: {error.strerror}"
            raise DiskError(f"{text}; make room and give the same command again.") from error

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

    def flush(self) -> None:
        """Write what is left in memory."""
        with explain_full_disk(self.folder):
            self.file.flush()

    def close(self) -> None:
        """Write what is left in memory, and close the file."""
        with explain_full_disk(self.folder):
            self.file.close()


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
    most_kept: int = 0  # bytes of the state that is kept after the last round
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
        self.metrics.flush()
        self._write(_make_checkpoint(result, recorder))

    def end(self, result: RoundResult, recorder: RunRecorder, status: Status) -> None:
        """Note the last round; after all rounds the state is kept, to be extended, if small."""
        self.reached = result
        found = _make_checkpoint(result, recorder)
        if status != "finished" or checkpoint.exceeds(found, self.most_kept):
            return
        try:
            self._write(found)
        except DiskError as error:
            log.warning("%s It would only be needed to extend the run.", error)

    def _write(self, found: Checkpoint) -> None:
        checkpoint.save_checkpoint(self.folder, self.key, found)
        self.last = time.monotonic()


def _make_checkpoint(result: RoundResult, recorder: RunRecorder) -> Checkpoint:
    return Checkpoint(result.state, result.client_states, recorder.record(), recorder.window)
