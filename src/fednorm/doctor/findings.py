"""What an examination finds: its parts as values, and the report that holds them.

`Report.to_json` is the file that `fednorm doctor --json` writes; its keys are the fields here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fednorm.data.sampling import count_participants
from fednorm.errors import ConfigError
from fednorm.experiment.config import Experiment

Place: TypeAlias = Literal["convolution", "linear", "activation", "other", "not reached"]
# Where the statistics come from with which a gradient is measured.
Statistics: TypeAlias = Literal["batch", "exchanged", "start", "surveyed"]


@dataclass(frozen=True, slots=True)
class Model:
    """What was examined, and how."""

    name: str
    type: str
    shape: tuple[int, ...]  # of one sample
    classes: int
    dtype: str
    parameters: int
    algorithm: Mapping[str, Any]
    batch: int
    participation: float
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One normalization layer."""

    path: str
    paths: int  # under how many paths the model holds it
    type: str
    batch_norm: bool
    channels: int
    place: Place  # what it directly follows
    after: str  # the module or operation that made its input
    calls: int  # in one forward pass
    values: int  # per channel and sample
    tracks: bool  # running statistics


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of the model, in bytes and by kind."""

    total: int
    weights: int
    affine: int
    statistics: int
    counters: int
    statistic_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round of a strategy costs one client; or why the strategy refuses the model."""

    strategy: str
    refused: str | None = None
    exchanges: int | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    measures: bool | None = None  # whether clients pass over all their data before they train
    survey_bytes_up: float | None = None  # of one survey before an evaluation
    survey_bytes_down: float | None = None
    personal_bytes: int | None = None  # stay on the client between rounds
    momentum_bytes: int | None = None  # as well
    global_model: bool | None = None
    needs_rounds: bool | None = None
    needs_batch_statistics: bool | None = None


@dataclass(frozen=True, slots=True)
class Caution:
    """Something a person would want to know, with the numbers it rests on."""

    code: str
    text: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the clients' inputs to one layer are apart; means over channels that vary."""

    path: str
    shift: float | None  # mean over clients of |mean_i - mean| / √var
    var_ratio: float | None  # mean over clients of var_i / var
    var_ratio_min: float | None  # the client with the smallest
    var_ratio_max: float | None  # the client with the largest
    bias: float | None  # variance between clients / variance of all
    bias_alike: float | None  # the same with the samples dealt to the clients at random
    excess: float | None  # the difference of these two
    constant_channels: int  # left out: nothing varies in them


@dataclass(frozen=True, slots=True)
class Gradient:
    """How far a strategy's mean gradient is from that of one machine."""

    strategy: str
    statistics: Statistics
    deviation: float | None = None
    alike: float | None = None  # with the samples dealt to the clients at random
    excess: float | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Clients:
    """What was measured on the clients' data, at the initial weights."""

    data: str
    partition: str
    clients: int
    batches: int  # of each client
    left_out: tuple[int, ...]  # clients with batches of one value per channel
    unmeasured: str | None  # why nothing could be measured
    layers: tuple[Distance, ...] = ()
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A strategy, or None where nothing is known of the clients, and why."""

    strategy: str | None
    reasons: tuple[str, ...]
    thresholds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Examination:
    """What is known of a model and its setting, for warnings and the recommendation."""

    experiment: Experiment
    layers: Sequence[Layer]
    state: State
    costs: Sequence[Cost]
    clients: Clients | None  # None if there is no data

    @property
    def batch_norms(self) -> list[Layer]:
        """The BatchNorm layers."""
        return [layer for layer in self.layers if layer.batch_norm]

    @property
    def single_valued(self) -> list[Layer]:
        """The BatchNorm layers that have one value per channel of a sample."""
        return [layer for layer in self.batch_norms if layer.values == 1]

    @property
    def refusing(self) -> list[str]:
        """The strategies that refuse the model."""
        return [cost.strategy for cost in self.costs if cost.refused]

    @property
    def taking_part(self) -> tuple[int, int]:
        """How many clients take part in a round, and of how many."""
        trained = self.experiment.clients - self.experiment.unseen_clients
        return count_participants(trained, self.experiment.participation), trained

    def cost(self, strategy: str) -> Cost | None:
        """Return the cost of a strategy that is registered and takes the model."""
        found = [c for c in self.costs if c.strategy == strategy and not c.refused]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Report:
    """What will happen to a model in federated learning, in numbers."""

    schema: int
    model: Model
    layers: tuple[Layer, ...]
    state: State
    strategies: tuple[Cost, ...]
    warnings: tuple[Caution, ...]
    clients: Clients | None
    recommendation: Recommendation

    def to_json(self) -> str:
        """Return the report as JSON; what is not a finite number is null."""
        return json.dumps(
            _replace_non_finite(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False
        )


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    try:
        path.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}.") from None
