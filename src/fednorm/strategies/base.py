"""What strategies with BatchNorm layers have in common."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.layout import NORM_LAYERS
from fednorm.core.messages import Broadcast
from fednorm.core.strategy import Conversion, Strategy
from fednorm.nn import rules
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.nn.weight_std import standardize
from fednorm.registry import param

# Measured in docs/local-epochs.md.
FIXED_STATISTICS_REMEDY = (
    "With local steps, statistics that are fixed within a round need a smaller learning rate than "
    "those of the batch: choose a smaller one, or 'alignbn', which shares statistics and "
    "normalises with the batch's. algorithm.clip_norm = 1 keeps the loss finite, not the accuracy."
)


def require_batch_norm(conversion: Conversion, strategy: object, model: nn.Module) -> Conversion:
    """Return the conversion, or raise if there was nothing to convert."""
    if not conversion.replaced:
        others = list_other_norms(model)
        keeps = f", 'fedbn', whose clients keep {' and '.join(others)}," if others else ","
        raise ValueError(
            f"{type(strategy).__name__} needs BatchNorm layers, but {type(model).__name__} has "
            f"none; choose 'naive', which averages all of it{keeps} or a model with BatchNorm."
        )
    return conversion


def list_other_norms(model: nn.Module) -> list[str]:
    """Return the types of learning normalization layers that are not BatchNorm, such as LayerNorm.

    >>> list_other_norms(nn.Sequential(nn.LayerNorm(2), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)))
    ['LayerNorm', 'GroupNorm']
    """
    others = (m for m in model.modules() if isinstance(m, NORM_LAYERS))
    return list(
        dict.fromkeys(
            type(m).__name__
            for m in others
            if not isinstance(m, _BatchNorm) and any(True for _ in m.parameters(recurse=False))
        )
    )


def standardize_weights(conversion: Conversion) -> Conversion:
    """Standardise convolutions as `dualbn` does: (w-mean)/√(var·fan_in+1e-6), without bias.

    A BatchNorm layer that comes after a convolution takes its bias out; those that none comes after
    stay as they are.
    """
    standard = standardize(
        conversion.model, scale_by_fan_in=True, eps=1e-6, gain=False, bias=False, before_norms=True
    )
    both = conversion.replaced + standard.replaced
    return replace(conversion, model=standard.model, replaced=both)


class BatchNormStrategy(Strategy):
    """A strategy that keeps BatchNorm layers, which follow a rule."""

    needs_batch_statistics: ClassVar[bool] = True

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (for those that change it)
        """Normalise with the batch's own statistics, as in torch."""
        return rules.batch_stats

    def measure_rule(self) -> NormRule:
        """Normalise with the batch's own statistics."""
        return rules.calibrate_batch

    calibration_rule = adaptation_rule = measure_rule


@dataclass(frozen=True)
class RunningStatisticsStrategy(BatchNormStrategy):
    """A strategy whose running statistics follow with `stats_momentum`, shared or personal."""

    needs_tracking: ClassVar[bool] = False

    def takes(self, model: nn.Module) -> bool:
        """Return whether a model without BatchNorm layers is something for this strategy."""
        del model
        return False

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
        return converted if self.takes(model) else require_batch_norm(converted, self, model)


@dataclass(frozen=True)
class SharedStatisticsStrategy(RunningStatisticsStrategy):
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
