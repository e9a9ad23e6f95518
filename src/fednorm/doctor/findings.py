"""What an examination finds, part by part, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Place: TypeAlias = Literal["convolution", "linear", "activation", "other", "not reached"]


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
    statistics: Literal["batch", "exchanged", "start", "surveyed"]
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
