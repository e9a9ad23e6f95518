"""Results of rounds, runs, comparisons and figures: plain values for tables, plots and JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, TypeAlias

from torch import nn

from fednorm.core.messages import RejectedReply
from fednorm.core.types import ClientId
from fednorm.errors import ConfigError
from fednorm.experiment.diagnostics import Diagnostics
from fednorm.experiment.objective import ModelSource
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.experiment.summary.result_table import Tabular
from fednorm.experiment.summary.significance import measure_spread
from fednorm.experiment.trained_model import TrainedModel, load_model

# "stopped early" is by a callback; "stopped" is for lack of usable replies.
Status: TypeAlias = Literal["finished", "stopped early", "diverged", "stopped", "interrupted"]

SCHEMA = 1
_BY_ROUND = {"history", "diagnostics"}  # too much for results.json
# Columns of the tables of runs.
_OF_FINAL = ("accuracy", "loss", "train_loss", "weighted", "trained", "untrained", "unseen")
_OF_RUN = (
    *("best_accuracy", "epsilon", "delta", "exchanges_per_round", "bytes_up_per_round"),
    *("bytes_down_per_round", "seconds", "personal", "rejected", "dropped_out", "retries"),
)


@dataclass(frozen=True)
class Evaluation:
    """One test of the model; accuracies are fractions.

    `accuracy` is the main figure of the data's targets, of which 1 is perfect (`RunResult.metric`).
    Where a strategy keeps personal parts there is no global model: `accuracy` is then the mean
    over clients, each on its own test split or, with `evaluate = "global"`, on all test samples.
    Clients that have not trained yet count as well, with the personal layers of `unseen_init`.
    >>> Evaluation(round=10, accuracy=0.98, loss=0.1, train_loss=0.05).accuracy
    0.98
    """

    round: int
    accuracy: float  # the main figure of the data's targets, as `RunResult.metric` names it
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
    metrics: Mapping[str, float] | None = None  # the user's, by name; of personal models the mean

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Evaluation":
        """Return an evaluation that was written as JSON, which has no NaN and no tuples."""
        clients, metrics = values["per_client"], values.get("metrics")
        numbers = {key: _restore_nan(values[key]) for key in ("accuracy", "loss", "train_loss")}
        lists = {
            "per_client": None if clients is None else tuple(map(_restore_nan, clients)),
            "metrics": metrics and {key: _restore_nan(value) for key, value in metrics.items()},
        }
        return cls(**{**values, **numbers, **lists})


def _restore_nan(value: float | None) -> float:
    return nan if value is None else value


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
    metric: str = "accuracy"  # what the evaluation's accuracy is


@dataclass(frozen=True)
class RunResult(Tabular):
    """One strategy with one seed: what `simulate` returns, and `Comparison.runs` holds.

    >>> import fednorm
    >>> run = fednorm.simulate("gn", rounds=4, clients=3, eval_every=2)
    >>> [test.round for test in run.history], run.status, run.model().training
    ([2, 4], 'finished', False)
    """

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
    metric: str = "accuracy"  # what `accuracy` is: "mean IoU" of masks, "R²" of numbers, "F1"
    epsilon: float | None = None  # of the whole run; None also if there is no noise
    delta: float | None = None  # None if the run is not private
    frozen_from: int | None = None  # the first round with frozen statistics, if others came before
    stopped_by: str | None = None  # the callback that ended it early

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
        """Return a copy of the trained model in evaluation mode, of torch's layers where possible.

        `client` says whose, where clients keep layers themselves.
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
    def completed(self) -> bool:
        """Whether the run came to its end, or a callback ended it early."""
        return self.status in {"finished", "stopped early"}

    @property
    def final(self) -> Evaluation | None:
        """The last evaluation, or None if the run ended before the first."""
        return self.history[-1] if self.history else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of all evaluations."""
        return max((e.accuracy for e in self.history), default=None)

    def list_runs(self) -> list[dict[str, Any]]:
        """Return one row: the run with its last evaluation; accuracies are fractions."""
        final = self.final
        named = {"strategy": self.strategy, "name": self.strategy, "setting": "", "seed": self.seed}
        ended = {"status": self.status, "rounds": self.rounds, "metric": self.metric}
        values = {key: getattr(final, key, None) for key in _OF_FINAL}
        values |= {"worst_client": getattr(final, "worst", None)}
        values |= {"attack_success": getattr(final, "attack_success", None)}
        return [{**named, **ended, **values, **{key: getattr(self, key) for key in _OF_RUN}}]

    def list_rounds(self) -> list[dict[str, Any]]:
        """Return a row for each evaluation."""
        named = {"strategy": self.strategy, "seed": self.seed}
        kept = (asdict(replace(one, per_client=None)) for one in self.history)
        return [{**named, **{k: v for k, v in of.items() if k != "per_client"}} for of in kept]

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
    spread: float  # sample standard deviation over seeds; 0 with a single one
    best: float | None  # mean of the best accuracies
    worst_client: float | None  # mean over seeds
    trained: float | None  # mean over seeds; of clients that have trained, where some have not
    untrained: float | None  # mean over seeds; of clients that have not
    attack_success: float | None  # mean over seeds
    epsilon: float | None  # the largest of all seeds
    metrics: Mapping[str, tuple[float, float]]  # mean and deviation over seeds
    runs: tuple[RunResult, ...]

    @property
    def failures(self) -> tuple[RunResult, ...]:
        """The runs that did not come to an end."""
        return tuple(run for run in self.runs if not run.completed)


@dataclass(frozen=True)
class Comparison(Tabular):
    """The runs of all strategies and seeds: what `compare` returns.

    >>> import fednorm
    >>> result = fednorm.compare(["naive", "gn"], rounds=2, clients=3, seeds=2)
    >>> [row.strategy for row in result.summaries()], len(result.runs)
    (['naive', 'gn'], 4)
    """

    config: dict[str, Any]
    environment: dict[str, str]
    runs: tuple[RunResult, ...] = field(default=())
    # Training samples of each client by class, with the first seed; none if they are private.
    label_counts: tuple[tuple[int, ...], ...] = ()
    validation: "Comparison | None" = None  # by which the settings of `tune` were chosen
    missing: tuple[str, ...] = ()  # names of runs that a folder does not hold, as not finished

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

    def list_runs(self) -> list[dict[str, Any]]:
        """Return a row for each run, with its strategy's registered name and own setting."""
        rows = []
        for run in self.runs:
            entry = self.find_entry(run.strategy)
            about = {"name": entry.get("name") or run.strategy, "setting": _write_setting(entry)}
            rows += [{**row, **about} for row in run.list_runs()]
        return rows

    def list_rounds(self) -> list[dict[str, Any]]:
        """Return a row for each evaluation of each run."""
        return [row for run in self.runs for row in run.list_rounds()]

    def find_entry(self, label: str) -> dict[str, Any]:
        """Return the table of the strategy with this label; it is empty if the config has none."""
        for entry in self.config.get("strategies", []):
            table = dict(entry) if isinstance(entry, Mapping) else {"name": str(entry)}
            if (table.get("label") or table["name"]) == label:
                return table
        return {}

    def summaries(self) -> list[Summary]:
        """Return one summary for each strategy, in the order in which they were run."""
        by_label: dict[str, list[RunResult]] = {}
        for run in self.runs:
            by_label.setdefault(run.strategy, []).append(run)
        return [_summarize(label, tuple(runs)) for label, runs in by_label.items()]


def _write_setting(entry: Mapping[str, Any]) -> str:
    """Return a strategy's own settings of data and clients as JSON; an empty text without any."""
    own = {key: entry[key] for key in OWN_SETTINGS if key in entry and key != "algorithm"}
    return json.dumps(own, default=str) if own else ""


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
    return [replace_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _summarize(label: str, runs: tuple[RunResult, ...]) -> Summary:
    finals = [run.final for run in runs if run.final]
    accuracies = [final.accuracy for final in finals if isfinite(final.accuracy)]
    return Summary(
        strategy=label,
        accuracy=fmean(accuracies) if accuracies else None,
        spread=measure_spread(accuracies),
        best=fmean(r.best_accuracy or 0.0 for r in runs if r.history) if accuracies else None,
        worst_client=_mean(final.worst for final in finals),
        trained=_mean(final.trained for final in finals),
        untrained=_mean(final.untrained for final in finals),
        attack_success=_mean(final.attack_success for final in finals),
        epsilon=max((run.epsilon for run in runs if run.epsilon is not None), default=None),
        metrics=_summarize_metrics(finals),
        runs=runs,
    )


def _summarize_metrics(finals: Sequence[Evaluation]) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for name, value in (pair for final in finals for pair in (final.metrics or {}).items()):
        found.setdefault(name, []).append(value)
    return {name: (fmean(values), measure_spread(values)) for name, values in found.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


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
