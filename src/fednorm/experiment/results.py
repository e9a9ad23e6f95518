"""Results of rounds, runs, comparisons and figures: plain values for tables, plots and JSON."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal, TypeAlias

from torch import nn

from fednorm.core.messages import RejectedReply
from fednorm.core.types import ClientId
from fednorm.errors import ConfigError
from fednorm.experiment.diagnostics import Diagnostics, Window
from fednorm.experiment.model_object import ModelSource
from fednorm.experiment.trained_model import TrainedModel, load_model

Status: TypeAlias = Literal["finished", "diverged", "stopped", "interrupted"]

SCHEMA = 1
_BY_ROUND = {"history", "diagnostics"}  # too much for results.json


@dataclass(frozen=True)
class Evaluation:
    """One test of the model; accuracies are fractions.

    Where a strategy keeps personal parts there is no global model: `accuracy` is then the mean
    over clients, each on its own test split or, with `evaluate = "global"`, on all test samples.
    Clients that have not trained yet count as well, with the personal layers of `unseen_init`.
    """

    round: int
    accuracy: float
    loss: float
    train_loss: float
    per_client: tuple[float, ...] | None = None
    worst: float | None = None
    weighted: float | None = None  # by the size of the clients' test splits
    # Of personal models, if some clients have not trained yet: means over both kinds of clients.
    trained: float | None = None
    untrained: float | None = None
    unseen: float | None = None  # mean over clients that never train
    attack_success: float | None = None  # of a backdoor

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Evaluation":
        """Return an evaluation that was written as JSON, which has no NaN and no tuples."""
        losses = {key: values[key] for key in ("loss", "train_loss")}
        clients = values["per_client"]
        read = {**values, **{k: nan if loss is None else loss for k, loss in losses.items()}}
        return cls(**{**read, "per_client": None if clients is None else tuple(clients)})


@dataclass(frozen=True, slots=True)
class Event:
    """One round of a run, as callbacks get it: plain values."""

    strategy: str
    seed: int
    round: int
    train_loss: float
    exchanges: int = 0
    bytes_up: float = 0.0  # mean over clients
    bytes_down: float = 0.0
    rejected: tuple[RejectedReply, ...] = ()
    dropped_out: int = 0
    retries: int = 0
    evaluation: Evaluation | None = None  # if the model was tested
    diagnostics: Diagnostics | None = None  # if asked for

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Event":
        """Return an event that was written as JSON, which has no NaN and no tuples."""
        loss, found = values["train_loss"], values["evaluation"]
        read = {
            "train_loss": nan if loss is None else loss,
            "rejected": tuple(RejectedReply(**one) for one in values["rejected"]),
            "evaluation": None if found is None else Evaluation.from_json(found),
        }
        return cls(**{**values, **read})


@dataclass(frozen=True)
class RunResult:
    """One strategy with one seed."""

    strategy: str  # the label: the name, or what the config calls it
    seed: int
    status: Status
    history: tuple[Evaluation, ...]
    rounds: int  # that were finished
    exchanges_per_round: float
    bytes_up_per_round: float  # of one client
    bytes_down_per_round: float  # of one client
    seconds: float
    personal: bool = False  # accuracy is the mean over clients
    conversion: tuple[str, ...] = ()  # what converting the model replaced, dropped or skipped
    rejected: int = 0  # replies that were not used
    dropped_out: int = 0  # replies that did not arrive
    retries: int = 0  # attempts at rounds that had too few good replies
    error: str | None = None
    diagnostics: tuple[dict[str, float | None], ...] = ()  # one for each round, if asked for
    tested: int = 0  # test samples behind an accuracy
    metric: str = "accuracy"  # what `accuracy` is; "mean IoU" of segmentation
    epsilon: float | None = None  # of the whole run; None also if there is no noise
    delta: float | None = None  # None if the run is not private
    frozen_from: int | None = None  # the first round with frozen statistics, if others came before

    # Where the trained model is. No field: a result is compared and written without it.
    _trained: ClassVar[TrainedModel | Path | None] = None
    _source: ClassVar[ModelSource | None] = None  # the user's object, which a folder cannot hold

    def keep_model(
        self, trained: TrainedModel | Path | None, source: ModelSource | None = None
    ) -> "RunResult":
        """Return the result with its trained model, or with the folder that holds it."""
        result = replace(self)
        object.__setattr__(result, "_trained", trained)
        object.__setattr__(result, "_source", source)
        return result

    def model(self, *, client: ClientId | None = None) -> nn.Module:
        """Return the trained model in evaluation mode, of torch's layers where possible.

        Every call returns another copy. Where clients keep layers for themselves, `client` says
        whose model it is.

        >>> import fednorm
        >>> fednorm.simulate("fbn", rounds=2, clients=3).model().training
        False
        """
        if self.status in {"diverged", "interrupted"}:
            said = "has diverged" if self.status == "diverged" else "was interrupted"
            raise ConfigError(f"the run {said}, so it has no trained model.")
        if isinstance(self._trained, Path):
            return load_model(self._trained, self._source, client=client)
        if self._trained is not None:
            return self._trained.build(client)
        raise ConfigError(
            "the model of this run was not kept, as it was trained in another process (workers > 1)"
            " or the result was read from a file; run it with out=FOLDER, which holds the model."
        )

    @property
    def final(self) -> Evaluation | None:
        """The last evaluation, or None if the run ended before the first."""
        return self.history[-1] if self.history else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of all evaluations."""
        return max((e.accuracy for e in self.history), default=None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunResult":
        """Return a result that was written as JSON, which has no tuples."""
        lists = {key: tuple(values.get(key, ())) for key in ("diagnostics", "conversion")}
        history = tuple(Evaluation.from_json(entry) for entry in values["history"])
        return cls(**{**values, **lists, "history": history})

    def to_json(self) -> dict[str, Any]:
        """Return the entry of this run in results.json."""
        record = {k: v for k, v in asdict(self).items() if k not in _BY_ROUND}
        final = asdict(self.final) if self.final else {}
        known = {k: v for k, v in final.items() if k != "round" and v is not None}
        record["final"] = {"accuracy": None, "loss": None, **known}
        return {**record, "best_accuracy": self.best_accuracy}


@dataclass(frozen=True)
class Summary:
    """All seeds of one strategy; None where no run came to an evaluation."""

    strategy: str
    accuracy: float | None  # mean of the final accuracies
    spread: float  # standard deviation over seeds
    best: float | None  # mean of the best accuracies
    worst_client: float | None  # mean over seeds
    trained: float | None  # mean over seeds; of clients that have trained, where some have not
    untrained: float | None  # mean over seeds; of clients that have not
    attack_success: float | None  # mean over seeds
    epsilon: float | None  # the largest of all seeds
    runs: tuple[RunResult, ...]

    @property
    def failures(self) -> tuple[RunResult, ...]:
        """The runs that did not finish."""
        return tuple(run for run in self.runs if run.status != "finished")


@dataclass(frozen=True)
class Comparison:
    """The runs of all strategies and seeds."""

    config: dict[str, Any]
    environment: dict[str, str]
    runs: tuple[RunResult, ...] = field(default=())
    # Training samples of each client by class, with the first seed; none if they are private.
    label_counts: tuple[tuple[int, ...], ...] = ()
    validation: "Comparison | None" = None  # by which the settings of `tune` were chosen

    def to_json(self) -> dict[str, Any]:
        """Return the content of results.json."""
        tried = {"validation": self.validation.to_json()["runs"]} if self.validation else {}
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "config": self.config,
            "runs": [run.to_json() for run in self.runs],
            "label_counts": self.label_counts,
            **({"chosen": self.chosen, **tried} if tried else {}),
        }

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """The values of `tune` that were chosen for each strategy, by its label and their keys."""
        tuned = self.config.get("tune") or {}
        keys = ["algorithm.lr" if key == "lr" else key.removeprefix("strategy.") for key in tuned]
        found: dict[str, dict[str, Any]] = {}
        for entry in self.config["strategies"] if keys else ():
            values = {key.rpartition(".")[2]: _find_value(entry, key) for key in keys}
            found[entry["label"]] = {key: v for key, v in values.items() if v is not None}
        return found

    @property
    def tested_on(self) -> str:
        """What clients' own models are tested on, in words."""
        everywhere = self.config.get("evaluate") == "global"
        return "all test samples" if everywhere else "its own test split"

    @property
    def metric(self) -> str:
        """What the accuracies of the runs are, in words."""
        return self.runs[0].metric if self.runs else "accuracy"

    def summaries(self) -> list[Summary]:
        """Return one summary for each strategy, in the order in which they were run."""
        labels = dict.fromkeys(run.strategy for run in self.runs)
        return [
            _summarize(label, tuple(r for r in self.runs if r.strategy == label))
            for label in labels
        ]


def _find_value(table: Mapping[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    value = table.get(first)
    if not rest:
        return value
    return _find_value(value, rest) if isinstance(value, Mapping) else None


def replace_nan(value: Any) -> Any:
    """Turn numbers that JSON cannot write into null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(item) for item in value]
    return value


def _summarize(label: str, runs: tuple[RunResult, ...]) -> Summary:
    finals = [run.final for run in runs if run.final]
    accuracies = [final.accuracy for final in finals if isfinite(final.accuracy)]
    return Summary(
        strategy=label,
        accuracy=fmean(accuracies) if accuracies else None,
        spread=pstdev(accuracies) if accuracies else 0.0,
        best=fmean(r.best_accuracy or 0.0 for r in runs if r.history) if accuracies else None,
        worst_client=_mean(final.worst for final in finals),
        trained=_mean(final.trained for final in finals),
        untrained=_mean(final.untrained for final in finals),
        attack_success=_mean(final.attack_success for final in finals),
        epsilon=max((run.epsilon for run in runs if run.epsilon is not None), default=None),
        runs=runs,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


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
        values = asdict(replace(self, window={}))
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
            exchanges_per_round=_mean(self.exchanges) or 0.0,
            bytes_up_per_round=_mean(self.upload) or 0.0,
            bytes_down_per_round=_mean(self.download) or 0.0,
            seconds=self.seconds,
            rejected=self.rejected,
            dropped_out=self.dropped_out,
            retries=self.retries,
            error=error,
            diagnostics=tuple(self.diagnostics),
            frozen_from=self.frozen_from,
            **about,
        )


@dataclass(frozen=True)
class PanelResult:
    """One part of a figure, or one column of a table: strategies in one setting."""

    title: str  # such as "γ = 0"
    comparison: Comparison
    published: Mapping[str, float] = field(default_factory=dict)  # by label, in per cent
    published_exchanges: Mapping[str, float] = field(default_factory=dict)  # a round, by label
    published_std: Mapping[str, float] = field(default_factory=dict)  # of means, in points
    best: bool = False  # published numbers are the best of a run, not the final ones


@dataclass(frozen=True)
class FigureResult:
    """A figure: all that its report page shows."""

    title: str  # such as "FBN, Figure 3a"
    question: str  # that the experiment answers
    command: str  # that repeats it
    panels: tuple[PanelResult, ...]
    source: str = ""  # the paper
    cuts: tuple[str, ...] = ()  # how the setting differs from the paper's, a sentence each
    finals: str = ""  # what the panels differ in, if final values are drawn against it
    curves: tuple[str, ...] | None = None  # titles of the panels whose curves are drawn; all
    smoke: bool = False  # two rounds on synthetic data: its numbers mean nothing
    heat: tuple[str, str] | None = None  # methods whose difference is drawn panel by panel

    @property
    def curve_panels(self) -> tuple[PanelResult, ...]:
        """The panels whose curves are drawn, in the order in which the paper shows them."""
        if self.curves is None:
            return self.panels
        by_title = {panel.title: panel for panel in self.panels}
        return tuple(by_title[title] for title in self.curves if title in by_title)
