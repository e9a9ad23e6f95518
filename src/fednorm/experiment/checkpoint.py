"""A run on disk, so that it survives being killed.

A checkpoint is one safetensors file: the tensors of the server and of the clients' memories, and in
its header, as JSON, where they belong and what the run has recorded. Its name holds the SHA-256 of
its content, so that a file that was cut off or altered is known by its name. It is written under
another name, brought to the disk, and renamed. Nothing random is stored: every draw of a run
follows from its seed, client, round and step.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fednorm.core.messages import Memory, Rejected, Running, ServerState
from fednorm.core.types import ClientId

KEPT = 2  # the newest so many; if the last one is damaged, there is the one before
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a round."""

    state: ServerState
    memories: Mapping[ClientId, Memory]
    record: Mapping[str, Any]  # what was measured so far; plain values


class DiskError(OSError):
    """A checkpoint that could not be written; the message says what is left."""


def save(folder: Path, key: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the newest two are kept."""
    tensors: dict[str, Tensor] = {}
    header = {
        "key": key,
        "state": _flattened(checkpoint.state, tensors),
        "memories": {str(c): _flattened(m, tensors) for c, m in checkpoint.memories.items()},
        "record": dict(checkpoint.record),
    }
    content = safetensors.torch.save(tensors, {"run": json.dumps(header)})
    name = f"checkpoint-{checkpoint.state.round:08}-{sha256(content).hexdigest()}.safetensors"
    partial = folder / ".checkpoint.partial"
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / name)
        _sync(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DiskError(_explained(folder, error)) from error
    for _, old in list(_files(folder))[KEPT:]:
        old.unlink(missing_ok=True)


def _explained(folder: Path, error: OSError) -> str:
    kept = next((f"round {number}" for number, _ in _files(folder)), None)
    left = f"the checkpoint of {kept} is intact" if kept else "there is no checkpoint yet"
    return (
        f"a checkpoint cannot be written to {str(folder)!r}: {error.strerror}; {left}. Make room "
        "and give the same command again to go on."
    )


def newest(
    folder: Path, key: Mapping[str, Any], device: torch.device | str = "cpu"
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest good checkpoint of the same run, and what is to be said of bad ones."""
    messages = []
    for number, path in _files(folder):
        content = path.read_bytes()
        if sha256(content).hexdigest() not in path.name:
            messages.append(
                f"the checkpoint of round {number} in {str(folder)!r} is damaged; "
                "the one before it is used."
            )
            continue
        header, tensors = _read(content)
        if header["key"] == json.loads(json.dumps(key)):
            return _checkpoint(header, _Tensors(tensors, device)), messages
    return None, messages


def clear(folder: Path) -> None:
    """Remove all checkpoints."""
    for _, path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield round and path of the checkpoints, the newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    listed = ((int(match[1]), path) for match, path in found if match)
    yield from sorted(listed, reverse=True)


def _sync(folder: Path) -> None:
    """Bring the folder itself to the disk, where the system allows it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flattened(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return plain values with numbers in the place of tensors, which go into `tensors`."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # Two names may not share memory on disk, and tensors are written in their logical order.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor" if value.device.type == "cpu" else "device tensor": name}
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {"map": {key: _flattened(item, tensors) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"list": [_flattened(item, tensors) for item in value]}
    return {"value": value}


@dataclass(frozen=True)
class _Tensors:
    by_name: Mapping[str, Tensor]
    device: torch.device | str  # of the run


def _restored(tree: Mapping[str, Any], tensors: _Tensors) -> Any:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors.by_name[content]
    if kind == "device tensor":
        return tensors.by_name[content].to(tensors.device)
    if kind == "map":
        return {key: _restored(item, tensors) for key, item in content.items()}
    if kind == "list":
        return tuple(_restored(item, tensors) for item in content)
    return content


def _read(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])["__metadata__"]["run"]
    return json.loads(header), safetensors.torch.load(content)


def _checkpoint(header: Mapping[str, Any], tensors: _Tensors) -> Checkpoint:
    state = _restored(header["state"], tensors)
    running = {path: Running(**values) for path, values in state.pop("running").items()}
    rejected = tuple(Rejected(**values) for values in state.pop("rejected"))
    memories = {
        int(client): Memory(**_restored(tree, tensors))
        for client, tree in header["memories"].items()
    }
    return Checkpoint(
        ServerState(**state, running=running, rejected=rejected), memories, header["record"]
    )


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a trained model's tensors, by their `state_dict` keys."""
    partial = path.with_name(f".{path.name}.partial")
    # Tied layers have one tensor under several keys; each key gets its own copy.
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    partial.write_bytes(safetensors.torch.save(plain))
    partial.replace(path)
