"""What callbacks are told of runs, and the monitor that tells them.

Runs in other processes are followed in this one: their worker sends what happens, and waits for the
answer where a callback may end the run, so that it ends after the same round as it would here.

Early stopping is a callback that always is there: it needs no further package.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from fednorm.errors import CallbackError, ConfigError, DiskError, FednormError
from fednorm.experiment.callbacks import CALLBACKS, create_callback
from fednorm.experiment.results import Evaluation, Event, RunResult
from fednorm.experiment.schema.specs import Spec
from fednorm.names import unknown
from fednorm.objects import OBJECT
from fednorm.registry import param

_HOOKS = ("on_start", "on_round", "on_evaluation", "on_end", "on_skip")


@dataclass(frozen=True)
class RunStart:
    """A run that starts, or continues from a checkpoint: plain values."""

    strategy: str  # the label
    seed: int
    rounds: int  # planned
    done: int = 0  # rounds that were made before
    history: tuple[Evaluation, ...] = ()  # evaluations of these rounds
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the experiment, as in a TOML
    folder: Path | None = None  # of the run


class Callback:
    """Follows the runs of a comparison; override what you need.

    One object follows all runs, whose rounds alternate if several processes work: `strategy` and
    `seed` of what it gets say which run it is.

    >>> class Printer(Callback):
    ...     def on_evaluation(self, event):
    ...         print(event.strategy, event.round, event.evaluation.round)
    >>> import fednorm
    >>> _ = fednorm.compare(["gn"], rounds=1, seeds=1, clients=3, callbacks=[Printer()])
    gn 1 1
    """

    # Whether it never ends a run. Then it is not part of the settings of an experiment, and runs in
    # other processes do not wait for it.
    observes: ClassVar[bool] = False

    def on_start(self, start: RunStart) -> None:
        """Follow a run from its start, or from where it continues."""

    def on_round(self, event: Event) -> bool | None:
        """Look at a round; return True to end the run."""

    def on_evaluation(self, event: Event) -> bool | None:
        """Look at a round after which the model was tested; return True to end the run."""

    def on_end(self, result: RunResult) -> None:
        """Look at the result of a run that has ended, however it ended; it is recorded."""

    def on_skip(self, result: RunResult) -> None:
        """Look at the result of a run that the folder holds, and that is not repeated."""


class StopFlag(Protocol):
    """Tells a run to stop, as `threading.Event` does."""

    def is_set(self) -> bool:
        """Return whether the run should stop."""


# An object with some of the methods of `Callback`, or a function that gets every round.
Follower: TypeAlias = Callback | Callable[[Event], Any]


@dataclass(frozen=True)
class Monitor:
    """Follows runs: callbacks are told what happens, and a flag stops a run after a round."""

    callbacks: Sequence[Follower] = ()
    stop: StopFlag | None = None

    @property
    def stopped(self) -> bool:
        """Whether the run should stop."""
        return self.stop is not None and self.stop.is_set()

    @property
    def decides(self) -> bool:
        """Whether a callback may end runs."""
        return any(not getattr(callback, "observes", False) for callback in self.callbacks)

    def start(self, start: RunStart) -> None:
        """Tell that a run starts."""
        self._tell("on_start", start, f"before round {start.done + 1}")

    def report(self, event: Event) -> str | None:
        """Tell of a round; return the name of the callback that ends the run, if one does."""
        where = f"after round {event.round}"
        ended = self._tell("on_round", event, where)
        if event.evaluation is None:
            return ended
        return self._tell("on_evaluation", event, where) or ended

    def end(self, result: RunResult) -> None:
        """Tell that a run has ended."""
        self._tell("on_end", result, "after its end")

    def skip(self, result: RunResult) -> None:
        """Tell of a run that the folder holds."""
        self._tell("on_skip", result, "of an earlier command")

    def _tell(self, hook: str, told: RunStart | Event | RunResult, where: str) -> str | None:
        ended = None
        for callback in self.callbacks:
            function = _find_hook(callback, hook)
            if function is None:
                continue
            try:
                wish = function(told)
            except DiskError:  # of a file of the run itself
                raise
            except Exception as error:
                place = f"{told.strategy}, seed {told.seed}, {where}"
                raise _explain(callback, hook, error, place) from error
            if wish is True:
                ended = ended or name_callback(callback)
        return ended


UNWATCHED = Monitor()


def follow(named: Sequence[Spec], monitor: Monitor) -> Monitor:
    """Return a monitor that also tells the callbacks which a configuration names.

    Those that were given as objects are the monitor's already.
    """
    given = [describe_callback(callback) for callback in monitor.callbacks]
    new = [spec for spec in named if spec.model_dump() not in given]
    made = [check_callback(create_callback(spec.name, **spec.fields)) for spec in new]
    return replace(monitor, callbacks=(*monitor.callbacks, *made))


def describe_callback(callback: Follower) -> dict[str, Any]:
    """Return what a recorded config says of a callback that was given as an object.

    >>> describe_callback(create_callback("tensorboard"))
    {'name': 'tensorboard'}
    """
    kind = type(callback) if _has_hooks(callback) else callback
    if (
        is_dataclass(callback)
        and not isinstance(callback, type)
        and (known := CALLBACKS.name_of(type(callback)))
    ):
        given = {field.name: getattr(callback, field.name) for field in fields(callback)}
        defaults = {field.name: field.default for field in fields(callback)}
        return {"name": known, **{k: v for k, v in given.items() if v != defaults[k]}}
    return {"name": f"{OBJECT}{kind.__module__}.{getattr(kind, '__qualname__', '')}"}


def check_callback(callback: Any) -> Any:
    """Return an object if it can follow runs; raise ConfigError otherwise.

    >>> check_callback(3)
    Traceback (most recent call last):
    fednorm.errors.ConfigError: 3 is not a callback: it has none of the methods on_start, ...
    """
    if isinstance(callback, type):
        raise ConfigError(f"{callback.__name__} is a class; a callback is an object of it.")
    if not (_has_hooks(callback) or callable(callback)):
        raise ConfigError(
            f"{callback!r:.80} is not a callback: it has none of the methods {', '.join(_HOOKS)}, "
            "and is not a function of a round."
        )
    return callback


def _has_hooks(callback: Follower) -> bool:
    return any(hasattr(callback, name) for name in _HOOKS)


def _find_hook(callback: Follower, hook: str) -> Callable[..., Any] | None:
    if _has_hooks(callback):
        return getattr(callback, hook, None)
    return callback if hook == "on_round" and callable(callback) else None


def name_callback(callback: Follower) -> str:
    """Return the name of a callback in messages: its `name`, that of its class or function."""
    kind = type(callback) if _has_hooks(callback) else callback
    return str(getattr(callback, "name", "") or getattr(kind, "__qualname__", kind))


def _explain(callback: Follower, hook: str, error: Exception, where: str) -> CallbackError:
    """Return the error of a callback, with the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    why = str(error)
    if not isinstance(error, FednormError):
        why = f"{type(error).__name__}: {why} [{Path(last.filename).name}, line {last.lineno}]"
    return CallbackError(
        f"callback {name_callback(callback)} failed in {hook} ({where}): {why.rstrip('.')}. What "
        "is done is kept in the folder of the results, if there is one; the same command continues."
    )


_SMALLER_IS_BETTER = ("loss", "train_loss", "attack_success")
_METRICS = ("accuracy", "worst", "weighted", "trained", "untrained", "unseen", *_SMALLER_IS_BETTER)


@dataclass
class EarlyStopping(Callback):
    """Ends a run after some evaluations without an improvement.

    L. Prechelt, "Early Stopping - But When?", in: Neural Networks: Tricks of the Trade, 1998.

    The model is tested on the test samples, unless the data are held out: the number at which a run
    stops is then better than on unseen samples. Compare methods with the same rule.
    """

    name: ClassVar[str] = "early_stopping"

    metric: str = param("accuracy", "which number of an evaluation is watched")
    patience: int = param(10, "evaluations without an improvement after which the run ends")
    min_delta: float = param(0.0, "what counts as an improvement is larger than this")
    mode: Literal["auto", "max", "min"] = param(
        "auto", "'max' if more is better, 'min' if less is; 'auto' knows it of the metric"
    )

    def __post_init__(self) -> None:
        if self.metric not in _METRICS:
            raise unknown("metric of early_stopping", self.metric, _METRICS)
        if self.patience < 1:
            raise ConfigError(f"patience is 1 evaluation or more, not {self.patience}.")
        if not 0 <= self.min_delta < float("inf"):
            raise ConfigError(f"min_delta is 0 or more and finite, not {self.min_delta}.")
        if self.mode not in {"auto", "max", "min"}:
            raise ConfigError(f"mode is 'auto', 'max' or 'min', not {self.mode!r}.")
        # Of each run: the best value, and how many evaluations came after it.
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def on_start(self, start: RunStart) -> None:
        """Follow a run; one that continues has evaluations already."""
        self._seen.pop((start.strategy, start.seed), None)
        for evaluation in start.history:
            self._note(start.strategy, start.seed, evaluation)

    def on_evaluation(self, event: Event) -> bool:
        """Return whether the run has not improved for `patience` evaluations."""
        assert event.evaluation is not None, "this is told of evaluations"  # noqa: S101
        return self._note(event.strategy, event.seed, event.evaluation) >= self.patience

    def _note(self, strategy: str, seed: int, evaluation: Evaluation) -> int:
        """Return how many evaluations, up to this one, came after the best."""
        value = getattr(evaluation, self.metric)
        if value is None:
            raise ConfigError(
                f"early_stopping watches {self.metric!r}, but evaluations of {strategy} have none; "
                "choose another metric, such as 'accuracy' or 'loss'."
            )
        falling = self.mode == "min" or (self.mode == "auto" and self.metric in _SMALLER_IS_BETTER)
        score = -value if falling else value
        best, waited = self._seen.get((strategy, seed), (-float("inf"), 0))
        better = isfinite(score) and score > best + self.min_delta
        self._seen[strategy, seed] = (score, 0) if better else (best, waited + 1)
        return self._seen[strategy, seed][1]
