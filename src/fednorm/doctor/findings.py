"""The findings of an examination, and the report that holds them.

`Report.to_json` is the file that `fednorm doctor --json` writes; its keys are the fields here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal, TypeAlias

from fednorm.data.sampling import count_participants
from fednorm.errors import ConfigError
from fednorm.experiment.results import replace_nan
from fednorm.experiment.schema.config import Experiment

Place: TypeAlias = Literal["convolution", "linear", "activation", "other", "not reached"]
# The source of the statistics with which a gradient is measured.
Statistics: TypeAlias = Literal["batch", "exchanged", "start", "calibrated"]

SURE = 2.0  # standard errors by which a difference exceeds chance


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The examined model and its setting."""

    name: str
    type: str
    shape: tuple[int, ...]  # of one sample
    classes: int
    dtype: str
    parameters: int
    algorithm: Mapping[str, Any]
    batch_size: int
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
    calibration_bytes_up: float | None = None  # of one calibration before an evaluation
    calibration_bytes_down: float | None = None
    personal_bytes: int | None = None  # kept on the client between rounds
    momentum_bytes: int | None = None  # as well
    global_model: bool | None = None
    needs_rounds: bool | None = None
    needs_batch_statistics: bool | None = None


@dataclass(frozen=True, slots=True)
class Caution:
    """A warning, with the numbers behind it."""

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
    bias_alike: float | None  # the same with samples dealt to clients at random
    excess: float | None  # the difference of these two
    constant_channels: int  # left out: their values do not vary


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
class ClientShift:
    """Measurements on the clients' data, at the initial weights."""

    data: str
    partition: str
    clients: int
    batches: int  # of each client
    left_out: tuple[int, ...]  # clients with batches of one value per channel
    unmeasured: str | None  # why nothing could be measured
    layers: tuple[Distance, ...] = ()
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a race may take: a time, or a length in rounds, which gives equal results everywhere.

    >>> Budget(120.0).seconds, Budget(rounds=40).rounds
    (120.0, 40)
    """

    seconds: float = 60.0
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """One test of an entrant on validation samples; accuracies are fractions."""

    round: int
    accuracy: float  # on all of them; of personal models as `own`
    own: float  # mean over clients, each on its own


@dataclass(frozen=True, slots=True)
class Entrant:
    """A strategy at one learning rate in a race."""

    strategy: str
    settings: Mapping[str, Any]  # the strategy as a TOML file would list it
    lr: float
    personal: bool = False  # each client keeps its own model
    status: Literal["racing", "dropped", "diverged", "refused"] = "racing"
    note: str | None = None  # why it diverged or was refused
    rounds: int = 0
    tested: int = 0  # validation samples
    marks: tuple[Mark, ...] = ()
    repeats: tuple[float, ...] = ()  # scores at the end with further seeds

    def find_last(self, rounds: int) -> list[Mark]:
        """Return the tests in the last quarter of the first `rounds` rounds."""
        return [m for m in self.marks if 0.75 * rounds < m.round <= rounds]

    def score(self, rounds: int, *, own: bool = False) -> float | None:
        """Return the mean accuracy in the last quarter of the first `rounds` rounds."""
        found = [m.own if own else m.accuracy for m in self.find_last(rounds)]
        return fmean(found) if found and isfinite(sum(found)) else None


def average(entrant: Entrant | None, rounds: int) -> float:
    """Return the accuracy after some rounds, in the mean over seeds; 0 if there is none."""
    return fmean([entrant.score(rounds) or 0.0, *entrant.repeats]) if entrant else 0.0


def estimate_noise(pair: Sequence[Entrant | None], rounds: int) -> float:
    """Return how far two accuracies differ by chance: few samples, and changes between tests."""
    error = 0.0
    for entrant in pair:
        marks = [m.accuracy for m in entrant.find_last(rounds)] if entrant else []
        if entrant and marks:
            share = (fmean(marks) * entrant.tested + 1) / (entrant.tested + 2)
            of_samples = share * (1 - share) / entrant.tested
            of_tests = pvariance(marks) / len(marks)
            error += (of_samples + of_tests) / (1 + len(entrant.repeats))
    return SURE * sqrt(error)


@dataclass(frozen=True, slots=True)
class Race:
    """How the candidates did in a short run of the user's setting."""

    rounds: int  # its length; 0 if there was no time for it
    wanted: int  # rounds that the user asks for
    seconds: float
    needed: float | None  # seconds that a race needs at least, if that was measured
    ended: Literal["finished", "late", "interrupted"]
    entrants: tuple[Entrant, ...] = ()


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A strategy, or None if nothing is known, with what the race says of it, and the reasons."""

    strategy: str | None
    reasons: tuple[str, ...]
    lr: float | None = None
    rounds: int = 0  # that were compared
    accuracy: float | None = None  # on validation samples
    naive: float | None = None  # of naive at its best learning rate, after as many rounds
    noise: float | None = None  # how much of their difference may be chance
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the strategy, with its name
    commands: tuple[str, ...] = ()  # that compare it with naive, and use it in Flower


@dataclass(frozen=True, slots=True)
class Examination:
    """All measurements, as input of warnings and of the recommendation."""

    experiment: Experiment
    layers: Sequence[Layer]
    state: State
    costs: Sequence[Cost]
    clients: ClientShift | None  # None if there is no data
    race: Race | None = None  # None if there is no data, no BatchNorm, or no budget

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
        """The number of clients in a round, and of all clients that train."""
        trained = self.experiment.clients - self.experiment.unseen_clients
        return count_participants(trained, self.experiment.participation), trained


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The report of `fednorm doctor`.

    >>> import fednorm
    >>> fednorm.doctor.examine("mlp", shape=(4,), classes=3).model.parameters
    9475
    """

    schema: int
    model: ModelSummary
    layers: tuple[Layer, ...]
    state: State
    strategies: tuple[Cost, ...]
    warnings: tuple[Caution, ...]
    clients: ClientShift | None
    race: Race | None
    recommendation: Recommendation

    def to_json(self) -> str:
        """Return the report as JSON; numbers that are not finite become null."""
        record = replace_nan(asdict(self))
        return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)


def save(report: DoctorReport, path: Path) -> None:
    """Write a report as JSON.

    >>> save(fednorm.doctor.examine("resnet"), Path("report.json"))  # doctest: +SKIP
    """
    try:
        path.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}.") from None
