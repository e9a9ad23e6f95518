"""Collects the rounds of a run into its result."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from fednorm.engines.simulate import RoundResult
from fednorm.experiment.diagnostics import Diagnostics
from fednorm.experiment.result import Evaluation, RunResult, Status
from fednorm.experiment.window import Window


@dataclass
class RunRecorder:
    """What was measured so far."""

    history: list[Evaluation] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    download: list[float] = field(default_factory=list)
    diagnostics: list[Diagnostics] = field(default_factory=list)
    rejected: int = 0
    dropped_out: int = 0
    retries: int = 0
    before: float = 0.0  # seconds, until the run was last begun
    begun: float = field(default_factory=time.perf_counter)
    window: Window = field(default_factory=dict)  # behind the diagnostics; tensors

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "RunRecorder":
        """Go on from what a checkpoint holds."""
        history = [Evaluation.from_json(values) for values in record["history"]]
        return cls(**{**record, "history": history})

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors: plain values."""
        values = asdict(replace(self, window={}))
        del values["begun"], values["window"]
        return {**values, "before": self.seconds}

    @property
    def seconds(self) -> float:
        """How long the run has taken, with all its beginnings."""
        return self.before + time.perf_counter() - self.begun

    def add(
        self,
        result: RoundResult,
        evaluation: Evaluation | None,
        diagnostics: Diagnostics | None,
        *,
        sends: bool,
    ) -> None:
        """Add a round; one machine that holds everything sends nothing to anybody."""
        self.exchanges.append(result.exchanges * sends)
        self.upload.append(result.bytes_up * sends)
        self.download.append(result.bytes_down * sends)
        self.rejected += len(result.rejected)
        self.dropped_out += result.dropped_out
        self.retries += result.retries
        if evaluation is not None:
            self.history.append(evaluation)
        if diagnostics is not None:
            self.diagnostics.append(diagnostics)

    def result(self, status: Status, error: str | None = None, **about: Any) -> RunResult:
        """Return what there is; `about` says which run it is."""
        return RunResult(
            status=status,
            history=tuple(self.history),
            rounds=len(self.exchanges),
            exchanges_per_round=_mean(self.exchanges),
            bytes_up_per_round=_mean(self.upload),
            bytes_down_per_round=_mean(self.download),
            seconds=self.seconds,
            rejected=self.rejected,
            dropped_out=self.dropped_out,
            retries=self.retries,
            error=error,
            diagnostics=tuple(self.diagnostics),
            **about,
        )


def _mean(values: list[int] | list[float]) -> float:
    return fmean(values) if values else 0.0
