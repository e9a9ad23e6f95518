"""A run on disk, so that it survives being killed.

A checkpoint is one safetensors file: the tensors of the server, of client states and of
diagnostics, and in its header, as JSON, their structure and what the run has recorded. Its name
holds the SHA-256 of its content, so that a truncated or altered file is noticed. It is written
under another name, synced to disk, and renamed. No random state is stored: every draw of a run
follows from its seed, client, round and step.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import file_digest
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fednorm.core.messages import ClientState, RejectedReply, RunningStats, ServerState
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.errors import DiskError
from fednorm.experiment.diagnostics import Diagnostics, Window, WindowMoments
from fednorm.experiment.results import Evaluation, Event, RunResult, Status
from fednorm.system import open_regular

KEPT = 2  # newest checkpoints; if the last one is damaged, the one before is used
_ALIGNED = 8  # bytes
_LONGEST = 100_000_000  # bytes of a header that safetensors reads
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round."""

    state: ServerState
    client_states: Mapping[ClientId, ClientState]
    record: Mapping[str, Any]  # what was measured so far; plain values
    window: Window = field(default_factory=dict)  # of the diagnostics


@dataclass
class RunRecorder:
    """The measurements of a run so far."""

    history: list[Evaluation] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    download: list[float] = field(default_factory=list)
    diagnostics: list[Diagnostics] = field(default_factory=list)
    rejected: int = 0
    dropped_out: int = 0
    retries: int = 0
    frozen_from: int | None = None
    before: float = 0.0  # seconds of the parts before the last start
    begun: float = field(default_factory=time.perf_counter)
    window: Window = field(default_factory=dict)  # of the diagnostics; tensors

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "RunRecorder":
        """Continue from the record of a checkpoint."""
        history = [Evaluation.from_json(values) for values in record["history"]]
        return cls(**{**record, "history": history})

    def record(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint holds besides tensors."""
        values = dataclasses.asdict(dataclasses.replace(self, window={}))
        del values["begun"], values["window"]
        return {**values, "before": self.seconds}

    @property
    def seconds(self) -> float:
        """How long the run has taken, all its parts together."""
        return self.before + time.perf_counter() - self.begun

    def add(self, event: Event) -> None:
        """Add a round."""
        self.exchanges.append(event.exchanges)
        self.upload.append(event.bytes_up)
        self.download.append(event.bytes_down)
        self.rejected += len(event.rejected)
        self.dropped_out += event.dropped_out
        self.retries += event.retries
        if event.evaluation is not None:
            self.history.append(event.evaluation)
        if event.diagnostics is not None:
            self.diagnostics.append(event.diagnostics)

    def result(self, status: Status, error: str | None = None, **about: Any) -> RunResult:
        """Return the result so far; `about` identifies the run."""
        return RunResult(
            status=status,
            history=tuple(self.history),
            rounds=len(self.exchanges),
            exchanges_per_round=_average(self.exchanges),
            bytes_up_per_round=_average(self.upload),
            bytes_down_per_round=_average(self.download),
            seconds=self.seconds,
            rejected=self.rejected,
            dropped_out=self.dropped_out,
            retries=self.retries,
            error=error,
            diagnostics=tuple(self.diagnostics),
            frozen_from=self.frozen_from,
            **about,
        )


def _average(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def save_checkpoint(folder: Path, key: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the newest two are kept."""
    partial = folder / ".checkpoint.partial"
    try:
        with partial.open("w+b") as file:
            _write(file, key, checkpoint)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = file_digest(file, "sha256").hexdigest()
        name = f"checkpoint-{checkpoint.state.round:08}-{digest}.safetensors"
        partial.replace(folder / name)
        _sync(folder)
    except OSError as error:
        raise DiskError(_explain_error(folder, error)) from error
    finally:
        partial.unlink(missing_ok=True)
    for _, old in list(_list_files(folder))[KEPT:]:
        with contextlib.suppress(PermissionError):  # Windows keeps a file that is being read
            old.unlink(missing_ok=True)


def _write(file: BinaryIO, key: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Write a safetensors file tensor by tensor: client states may not fit into memory.

    It is walked through twice: for the header, which says where every tensor begins, and to write.
    """
    found: list[Tensor] = []  # without their values

    def note(tensor: Tensor) -> str:
        found.append(tensor.to("meta"))
        return str(len(found) - 1)

    header = {
        "key": key,
        "state": _flatten(checkpoint.state, note),
        "client_states": {str(c): _flatten(m, note) for c, m in checkpoint.client_states.items()},
        "window": {str(c): _flatten(seen, note) for c, seen in checkpoint.window.items()},
        "record": dict(checkpoint.record),
    }
    starts = _list_starts(found)
    places = {
        str(i): {
            "dtype": _name_of(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [starts[i], starts[i] + tensor.nbytes],
        }
        for i, tensor in enumerate(found)
    }
    text = json.dumps({"__metadata__": {"run": json.dumps(header)}, **places}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    if len(text) > _LONGEST:
        raise OSError(errno.EFBIG, f"{len(found)} tensors are more than its format can list")
    file.write(len(text).to_bytes(8, "little") + text)
    beginning, offsets = file.tell(), iter(starts)

    def put(tensor: Tensor) -> str:
        file.seek(beginning + next(offsets))
        # Tensors are written in their logical order.
        plain = tensor.detach().cpu().contiguous().flatten()
        file.write(plain.view(torch.uint8).numpy().data)
        return ""

    _flatten(checkpoint.state, put)
    for kept in chain(checkpoint.client_states.values(), checkpoint.window.values()):
        _flatten(kept, put)


def _list_starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offsets of tensors: without holes, each aligned to its number format."""
    starts, end = [0] * len(tensors), 0
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size()):
        starts[i], end = end, end + tensors[i].nbytes
    return starts


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a number format."""
    content = safetensors.torch.save({"t": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(content[:8], "little")
    return str(json.loads(content[8 : 8 + length])["t"]["dtype"])


def _explain_error(folder: Path, error: OSError) -> str:
    kept = next((f"round {number}" for number, _ in _list_files(folder)), None)
    left = f"the checkpoint of {kept} is intact" if kept else "there is no checkpoint yet"
    return (
        f"a checkpoint cannot be written to {str(folder)!r}: {error.strerror}; {left}. Make room "
        "and give the same command again to resume."
    )


def load_newest(
    folder: Path,
    key: Mapping[str, Any],
    device: torch.device | str = "cpu",
    check: Callable[[Checkpoint], None] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of the run `key`, and messages about damaged ones.

    A right checksum says that a file is whole, not that its content is a checkpoint: it is read
    with care, and `check` raises an error for content that does not fit the run.
    """
    messages = []
    for number, path in _list_files(folder):
        try:
            _check_digest(path)
            with safetensors.safe_open(path, "pt") as opened:
                header = json.loads(opened.metadata()["run"])
                if header["key"] != json.loads(json.dumps(key)):
                    continue
                found = _read_checkpoint(header, opened, device)
            if check:
                check(found)
        except _FAULTS:
            messages.append(
                f"the checkpoint of round {number} in {str(folder)!r} is damaged; "
                "the one before it is used."
            )
        else:
            return found, messages
    return None, messages


_FAULTS = (
    OSError,
    safetensors.SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)


def _check_digest(path: Path) -> None:
    with open_regular(path) as file:
        if file_digest(file, "sha256").hexdigest() not in path.name:
            raise ValueError(f"{path} is not what was written.")


def check_fit(checkpoint: Checkpoint, task: Task, clients: int, rounds: int | None) -> None:
    """Raise ValueError unless a checkpoint could be one of a run with this task."""
    state, initial = checkpoint.state, task.initial_state
    shapes = {key: _shape_of(value) for key, value in task.model.state_dict().items()}
    sizes = {key: shape for key, (shape, _) in shapes.items()}
    pairs = [(state.weights, initial.weights), (state.buffers, initial.buffers)]
    running = {path: {"mean": r.mean, "var": r.var} for path, r in state.running.items()}
    known = {path: {"mean": r.mean, "var": r.var} for path, r in initial.running.items()}
    pairs += [(running.get(path, {}), values) for path, values in known.items()]
    client_states = checkpoint.client_states
    own = [tensors for kept in client_states.values() for tensors in (kept.tensors, kept.optimizer)]
    own += state.optimizer.values()
    fits = (
        0 < state.round <= (rounds or state.round)
        and all(_shapes_of(found) == _shapes_of(needed) for found, needed in pairs)
        and running.keys() == known.keys()
        and all(isinstance(r.num_batches, int) for r in state.running.values())
        and all(0 <= client < clients for client in client_states)
        and all(sizes.get(k) == _shape_of(t)[0] for some in own for k, t in some.items())
        and all(isinstance(t, Tensor) for t in {**state.strategy_state, **state.momentum}.values())
    )
    if not fits:
        raise ValueError("the checkpoint holds other tensors than this run needs.")


def _shape_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: _shape_of(tensor) for key, tensor in tensors.items()}


def clear_checkpoints(folder: Path, *, last: int | None = None, most: int = 0) -> None:
    """Remove checkpoints; the newest of the round `last` stays if it has at most `most` bytes."""
    for place, (number, path) in enumerate(list(_list_files(folder))):
        if place or number != last or path.stat().st_size > most:
            path.unlink(missing_ok=True)


def exceeds(checkpoint: Checkpoint, limit: int) -> bool:
    """Return whether the tensors of a checkpoint take more than `limit` bytes."""
    held = 0

    def count(tensor: Tensor) -> str:
        nonlocal held
        held += tensor.nbytes
        return ""

    parts = (checkpoint.client_states.values(), checkpoint.window.values())
    for part in chain([checkpoint.state], *parts):  # states of clients may be on disk
        _flatten(part, count)
        if held > limit:
            return True
    return False


def _list_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield round and path of the checkpoints, the newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    listed = ((int(match[1]), path) for match, path in found if match and not path.is_dir())
    yield from sorted(listed, reverse=True)


def _sync(folder: Path) -> None:
    """Sync the folder itself to disk, where the system allows it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(value: Any, add: Callable[[Tensor], str]) -> Any:
    """Return plain values; each tensor is replaced by the name that `add` returns."""
    if isinstance(value, Tensor):
        return {"tensor" if value.device.type == "cpu" else "device tensor": add(value)}
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {"map": {key: _flatten(item, add) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"list": [_flatten(item, add) for item in value]}
    return {"value": value}


def _restore(tree: Mapping[str, Any], file: Any, device: torch.device | str) -> Any:
    """Return what `_flatten` was given, with tensors of an open file; dataclasses as mappings."""
    ((kind, content),) = tree.items()
    if kind.endswith("tensor"):
        return file.get_tensor(content).to("cpu" if kind == "tensor" else device)
    if kind == "map":
        return {key: _restore(item, file, device) for key, item in content.items()}
    if kind == "list":
        return tuple(_restore(item, file, device) for item in content)
    return content


def _read_checkpoint(
    header: Mapping[str, Any], file: Any, device: torch.device | str
) -> Checkpoint:
    restore = partial(_restore, file=file, device=device)
    state = restore(header["state"])
    running = {path: RunningStats(**values) for path, values in state.pop("running").items()}
    rejected = tuple(RejectedReply(**values) for values in state.pop("rejected"))
    client_states = {int(c): ClientState(**restore(t)) for c, t in header["client_states"].items()}
    window = {int(c): WindowMoments(**restore(t)) for c, t in header["window"].items()}
    state = ServerState(**state, running=running, rejected=rejected)
    return Checkpoint(state, client_states, header["record"], window)
