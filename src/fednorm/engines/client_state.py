"""States of clients between their rounds: in memory up to a limit, the rest on disk.

A store is a value: `with_states` returns a new one and leaves the old one unchanged. Files are
never changed, and removed with their last reference. They are in the folder for temporary files, which
TMPDIR names.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
from torch import Tensor

from fednorm.core.messages import ClientState
from fednorm.core.types import ClientId, nbytes

LIMIT = 4_000_000_000  # bytes


class TemporaryFolder:
    """A temporary folder, removed with its last reference."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fednorm-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class _OnDisk:
    """A client state in a file."""

    def __init__(self, client_state: ClientState, folder: TemporaryFolder) -> None:
        self.folder = folder
        tensors = {f"tensors {name}": t for name, t in client_state.tensors.items()}
        tensors |= {f"optimizer {name}": t for name, t in client_state.optimizer.items()}
        self.devices = {name: t.device for name, t in tensors.items()}
        with tempfile.NamedTemporaryFile(dir=folder.path, delete=False) as file:
            self.path = Path(file.name)
        plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        safetensors.torch.save_file(plain, self.path)
        weakref.finalize(self, self.path.unlink, missing_ok=True)

    def read(self) -> ClientState:
        found: dict[str, dict[str, Tensor]] = {"tensors": {}, "optimizer": {}}
        for name, tensor in safetensors.torch.load_file(self.path).items():
            part, _, key = name.partition(" ")
            found[part][key] = tensor.to(self.devices[name])
        return ClientState(**found)


_Entry: TypeAlias = ClientState | _OnDisk


def count_bytes(client_state: ClientState) -> int:
    """Return the bytes of a client state."""
    return nbytes([*client_state.tensors.values(), *client_state.optimizer.values()])


@dataclass(frozen=True)
class ClientStateStore(Mapping[ClientId, ClientState]):
    """The states of all clients that have trained."""

    limit: int = LIMIT  # bytes in memory
    entries: Mapping[ClientId, _Entry] = field(default_factory=dict)  # the oldest first
    held: int = 0  # bytes in memory
    folder: TemporaryFolder | None = None

    def __getitem__(self, client: ClientId) -> ClientState:
        entry = self.entries[client]
        return entry if isinstance(entry, ClientState) else entry.read()

    def __contains__(self, client: object) -> bool:  # without reading a file
        return client in self.entries

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def with_states(self, new: Mapping[ClientId, ClientState]) -> "ClientStateStore":
        """Return the store with `new` states; those that have waited longest go to disk."""
        before = (self.entries.get(client) for client in new)
        gone = sum(count_bytes(entry) for entry in before if isinstance(entry, ClientState))
        held, folder = self.held - gone + sum(map(count_bytes, new.values())), self.folder
        old = {client: entry for client, entry in self.entries.items() if client not in new}
        entries: dict[ClientId, _Entry] = {**old, **new}
        for client, entry in list(entries.items()) if held > self.limit else ():
            if held > self.limit and isinstance(entry, ClientState) and count_bytes(entry):
                folder = folder or TemporaryFolder()
                entries[client] = _OnDisk(entry, folder)
                held -= count_bytes(entry)
        return ClientStateStore(self.limit, entries, held, folder)
