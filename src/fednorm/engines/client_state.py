"""States of clients between their rounds: in memory up to a limit, the rest on disk.

A store is a value: `with_states` returns a new one and leaves the old one unchanged. Files are
never changed, and removed with their last reference. They are in the folder for temporary files,
which TMPDIR names.
"""

import secrets
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
from torch import Tensor

from fednorm.core.messages import ClientState
from fednorm.core.types import ClientId, Tensors, nbytes
from fednorm.errors import DiskError
from fednorm.system import TemporaryFolder

LIMIT = 4_000_000_000  # bytes


class _OnDisk:
    """A client state in a file."""

    def __init__(self, client_state: ClientState, folder: TemporaryFolder) -> None:
        self.folder = folder
        tensors = {f"tensors {name}": t for name, t in client_state.tensors.items()}
        tensors |= {f"optimizer {name}": t for name, t in client_state.optimizer.items()}
        self.devices = {name: t.device for name, t in tensors.items()}
        self.path = folder.path / f"{secrets.token_hex(8)}.safetensors"
        write_state(self.path, tensors)
        weakref.finalize(self, self.path.unlink, missing_ok=True)

    def read(self) -> ClientState:
        found: dict[str, dict[str, Tensor]] = {"tensors": {}, "optimizer": {}}
        # From bytes: to map a file costs half a kilobyte that is never given back.
        read = safetensors.torch.load(self.path.read_bytes())
        for name, device in self.devices.items():  # in the order in which they came
            part, _, key = name.partition(" ")
            found[part][key] = read[name].to(device, copy=True)
        return ClientState(**found)


def write_state(path: Path, tensors: Tensors) -> None:
    """Write the tensors of a client state, or nothing."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        path.write_bytes(safetensors.torch.save(plain))
    except OSError:
        path.unlink(missing_ok=True)
        raise


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
                with _explain_errors():
                    folder = folder or TemporaryFolder()
                    entries[client] = _OnDisk(entry, folder)
                held -= count_bytes(entry)
        return ClientStateStore(self.limit, entries, held, folder)


@contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"client states cannot be written to {tempfile.gettempdir()!r}: {error.strerror}; make "
            "room, let TMPDIR name another folder, or raise client_state_memory."
        ) from error
