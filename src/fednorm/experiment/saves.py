"""Saves a run while it goes on, and finds where it stopped."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fednorm.core.messages import RejectedReply
from fednorm.engines.simulate import RoundResult
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.result import replace_nan
from fednorm.experiment.run import Event
from fednorm.experiment.tally import RunRecorder

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
        counts = {"vanished": event.dropped_out, "repeated": event.retries}
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
    reached: RoundResult | Checkpoint | None = None  # where the run is

    def start(self, device: torch.device | str) -> tuple[Checkpoint | None, list[str]]:
        """Return where the run stopped, if it did, and what is to be said about it."""
        found, messages = checkpoint.load_newest(self.folder, self.key, device)
        if found and self.metrics.truncate(found.state.round):
            self.reached = found
            return found, messages
        self.metrics.truncate(0)
        return None, messages

    def after(self, result: RoundResult, tally: RunRecorder) -> None:
        """Save if it is time."""
        self.reached = result
        by_clock = time.monotonic() - self.last > CHECKPOINT_SECONDS
        if by_clock if self.every is None else result.state.round % self.every == 0:
            self.save(result, tally)

    def save(self, result: RoundResult, tally: RunRecorder) -> None:
        """Save now."""
        self.metrics.file.flush()
        found = Checkpoint(result.state, result.client_states, tally.record(), tally.window)
        checkpoint.save_checkpoint(self.folder, self.key, found)
        self.last = time.monotonic()
