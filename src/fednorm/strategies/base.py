"""What strategies have in common: the defaults that most of them keep."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.layer import Calibration, NormLayer, NormRule, Statistics
from fednorm.core.merge import average, ema_update, pool_statistics
from fednorm.core.messages import Broadcast, RunningStats, ServerState
from fednorm.core.strategy import Conversion, MergeInput
from fednorm.core.types import Clip, Kind, Role, Tensors
from fednorm.nn import rules
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.nn.weight_std import standardize
from fednorm.registry import param

SHARED: Mapping[Kind, Role] = {
    Kind.AFFINE: Role.SHARED,
    Kind.STATISTIC: Role.STATISTIC,
    Kind.COUNTER: Role.STATISTIC,
}


def require_batch_norm(conversion: Conversion, strategy: object, model: nn.Module) -> Conversion:
    """Return the conversion, or raise if there was nothing to convert."""
    if not conversion.replaced:
        raise ValueError(
            f"{type(strategy).__name__} needs BatchNorm layers, but {type(model).__name__} has "
            "none; choose 'none' or a model with BatchNorm."
        )
    return conversion


def standardize_weights(conversion: Conversion) -> Conversion:
    """Standardise convolutions as `dualbn` does: (w-mean)/√(var·fan_in+1e-6), without bias.

    A BatchNorm layer that comes after a convolution takes its bias out; those that none comes after
    stay as they are.
    """
    standard = standardize(
        conversion.model,
        scale_by_fan_in=True,
        eps=1e-6,
        gain=False,
        bias=False,
        before_norms=True,
    )
    both = conversion.replaced + standard.replaced
    return replace(conversion, model=standard.model, replaced=both)


class Strategy:
    """The defaults: everything is shared, γ and β learn, the server remembers nothing.

    A method is a frozen dataclass that derives from this; its fields are its hyper-parameters.
    """

    statistics: Statistics = "average"
    roles: ClassVar[Mapping[Kind, Role]] = SHARED
    needs_batch_statistics: ClassVar[bool] = False
    mergeable_batches: ClassVar[bool] = False  # whether it is exact with all clients in one batch
    exchanges: ClassVar[bool] = False  # whether clients wait for each other within a round
    calibration: ClassVar[Calibration] = "never"
    measures: ClassVar[bool] = False  # whether a client's round begins with such a pass
    warmup: ClassVar[int] = 0  # rounds of learning-rate warm-up, unless the algorithm says else

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Return what is done with a tensor of this kind, owned by this module."""
        return self.roles[kind] if isinstance(module, _BatchNorm | NormLayer) else Role.SHARED

    def convert(self, model: nn.Module) -> Conversion:
        """Return a converted copy of a model."""
        raise NotImplementedError

    def rates(self, model: nn.Module) -> Mapping[nn.Parameter, float]:  # noqa: ARG002 (as below)
        """Return by what the learning rate of parameters is multiplied, where that is not 1."""
        return {}

    def clips(self, model: nn.Module) -> Mapping[nn.Parameter, Clip]:  # noqa: ARG002 (as below)
        """Return how gradients of parameters are clipped before each step, where they are."""
        return {}

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (for those that change it)
        """Return how layers treat batches in this round."""
        return rules.batch_stats

    def trains_affine(self, broadcast: Broadcast) -> bool:  # noqa: ARG002 (as above)
        """Return whether γ and β of BatchNorm layers learn in this round."""
        return True

    def reports(self, broadcast: Broadcast) -> bool:
        """Return whether layers report statistics in this round."""
        rule = self.measure_rule() if self.measures else self.rule(broadcast)
        return rule.reports != "nothing"

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Return a layer's shared running statistics after a round."""
        return ema_update(previous, merge) if self.statistics == "pool" else average(merge)

    def measure_rule(self) -> NormRule:
        """Return how layers treat a client's data in a pass before it trains."""
        return rules.calibrate_batch

    def calibration_rule(self) -> NormRule:
        """Return how layers treat batches while the clients' statistics are surveyed."""
        return rules.calibrate_batch

    def adaptation_rule(self) -> NormRule:
        """Return how layers treat a client's batches while it re-estimates its statistics."""
        return rules.calibrate_batch

    def adopt(self, previous: RunningStats, merge: MergeInput) -> RunningStats:  # noqa: ARG002 (as above)
        """Return a layer's shared running statistics after a survey."""
        return pool_statistics(merge)

    def remember(
        self,
        before: ServerState,  # noqa: ARG002 (as above)
        running: Mapping[str, RunningStats],  # noqa: ARG002 (as above)
    ) -> Tensors:
        """Return the notes that the server keeps for later rounds."""
        return {}


@dataclass(frozen=True)
class BatchNormStrategy(Strategy):
    """A strategy that keeps BatchNorm layers and shares or keeps their statistics."""

    needs_tracking: ClassVar[bool] = False

    stats_momentum: float | Literal["layer"] | None = param(
        "layer",
        "momentum of the running statistics, in (0, 1]; 'none' is the cumulative average, "
        "'layer' keeps what each layer of the model says",
    )

    def __post_init__(self) -> None:
        known = self.stats_momentum is None or self.stats_momentum == "layer"
        if not known and not (
            isinstance(self.stats_momentum, int | float) and 0 < self.stats_momentum <= 1
        ):
            raise ValueError(
                f"stats_momentum must be in (0, 1], None or 'layer', not {self.stats_momentum!r}."
            )

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers follow this strategy's rule."""
        converted = to_fed_batch_norm(
            model, momentum=self.stats_momentum, tracking=self.needs_tracking
        )
        return require_batch_norm(converted, self, model)


@dataclass(frozen=True)
class SharedStatisticsStrategy(BatchNormStrategy):
    """A strategy whose running statistics are merged at the server."""

    needs_tracking: ClassVar[bool] = True

    statistics: Statistics = param(
        "average",
        "'average' averages the clients' running statistics; "
        "'pool' merges their moments by the law of total variance",
    )
    weight_standardization: bool = param(
        default=False, help="standardise the weights of convolutions, as dualbn does"
    )

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers follow this strategy's rule."""
        converted = super().convert(model)
        return standardize_weights(converted) if self.weight_standardization else converted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics not in ("average", "pool"):
            raise ValueError(f"statistics must be 'average' or 'pool', not {self.statistics!r}.")
