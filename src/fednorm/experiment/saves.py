"""Saves a run while it goes on, and finds where it stopped."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fednorm.core.messages import Rejected
from fednorm.engines.simulate import Round
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.result import without_nan
from fednorm.experiment.run import Event
from fednorm.experiment.tally import Tally

SECONDS = 10.0  # between checkpoints, unless their distance is given in rounds


class Metrics:
    """The file metrics.jsonl: one line a round."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+", encoding="utf-8")

    def keep(self, rounds: int) -> bool:
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
            line["rejected"] = [_told(one) for one in event.rejected]
        counts = {"vanished": event.vanished, "repeated": event.repeated}
        line |= {key: count for key, count in counts.items() if count}
        if event.diagnostics is not None:
            line |= event.diagnostics
        if event.evaluation is not None:
            values = asdict(event.evaluation)
            line |= {key: value for key, value in values.items() if value is not None}
        self.file.write(json.dumps(without_nan(line), allow_nan=False) + "\n")
        if event.evaluation is not None:
            self.file.flush()


def _told(rejected: Rejected) -> dict[str, Any]:
    where = {"layer": rejected.where} if rejected.where else {}
    return {"client": rejected.client, **where, "reason": rejected.reason}


@dataclass
class Saves:
    """Writes checkpoints of one run into its folder."""

    folder: Path
    key: Mapping[str, Any]  # of which run they are
    metrics: Metrics
    every: int | None = None  # rounds between checkpoints; by the clock if none
    last: float = field(default_factory=time.monotonic)
    reached: Round | Checkpoint | None = None  # where the run is

    def start(self, device: torch.device | str) -> tuple[Checkpoint | None, list[str]]:
        """Return where the run stopped, if it did, and what is to be said about it."""
        found, messages = checkpoint.newest(self.folder, self.key, device)
        if found and self.metrics.keep(found.state.round):
            self.reached = found
            return found, messages
        self.metrics.keep(0)
        return None, messages

    def after(self, result: Round, tally: Tally) -> None:
        """Save if it is time."""
        self.reached = result
        by_clock = time.monotonic() - self.last > SECONDS
        if by_clock if self.every is None else result.state.round % self.every == 0:
            self.save(result, tally)

    def save(self, result: Round, tally: Tally) -> None:
        """Save now."""
        self.metrics.file.flush()
        found = Checkpoint(result.state, result.memories, tally.record(), tally.window)
        checkpoint.save(self.folder, self.key, found)
        self.last = time.monotonic()
