"""FedFN: any strategy, plus L2-normalised features before the classifier.

Kim, Lee, Oh and Yun, "FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in
Federated Learning", 2023, arXiv:2311.13267.

Client: as the base strategy; the classifier, the last linear layer, sees the direction of a feature
vector and not its length.

Server: as the base strategy.

Deviation: the classifier keeps its bias, which the paper's formula does not have.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fednorm.core.strategy import Conversion, Replacement, Strategy
from fednorm.errors import ConversionError
from fednorm.nn.copies import MarkedLayer
from fednorm.registry import param
from fednorm.strategies import create_strategy


class DirectionLinear(MarkedLayer, nn.Linear):
    """Linear layer on L2-normalised input."""

    MARK = "normalizes_its_input_use_fednorm_load"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return the product with each input's direction."""
        return functional.linear(functional.normalize(input, dim=-1), self.weight, self.bias)


def _delegate(name: str) -> Any:
    """Return a property that reads `name` of the base strategy."""
    return property(attrgetter(f"_base.{name}"))


@dataclass(frozen=True)
class FedFN(Strategy):
    """Any strategy, with L2-normalised features before the classifier."""

    base: str = param("naive", "the strategy that it adds to")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "fields of the base strategy, as a table"}
    )

    def __post_init__(self) -> None:
        if self.base == "fedfn":
            raise ValueError("FedFN adds to another strategy, not to itself; choose another base.")
        self._base  # noqa: B018 (an unknown base is refused here)

    @cached_property
    def _base(self) -> Strategy:
        options = {k: None if v == "none" else v for k, v in self.options.items()}
        return create_strategy(self.base, **options)

    def convert(self, model: nn.Module) -> Conversion:
        """Convert as the base strategy does, then normalise the features."""
        return _normalize_features(self._base.convert(model))

    # Everything else is the base strategy's.
    statistics = _delegate("statistics")
    roles = _delegate("roles")
    needs_batch_statistics = _delegate("needs_batch_statistics")
    mergeable_batches = _delegate("mergeable_batches")
    exchanges = _delegate("exchanges")
    calibration = _delegate("calibration")
    measures = _delegate("measures")
    merges_sums = _delegate("merges_sums")
    warmup = _delegate("warmup")
    remedy = _delegate("remedy")
    role = _delegate("role")
    rates = _delegate("rates")
    clips = _delegate("clips")
    rule = _delegate("rule")
    trains_affine = _delegate("trains_affine")
    reports = _delegate("reports")
    merge = _delegate("merge")
    measure_rule = _delegate("measure_rule")
    calibration_rule = _delegate("calibration_rule")
    adaptation_rule = _delegate("adaptation_rule")
    adopt = _delegate("adopt")
    remember = _delegate("remember")


def _normalize_features(conversion: Conversion) -> Conversion:
    """Let the classifier of a converted model see directions; it is the last linear layer."""
    linear = [(path, m) for path, m in conversion.model.named_modules() if type(m) is nn.Linear]
    if not linear:
        raise ConversionError(
            f"{type(conversion.model).__name__} has no linear layer that could be its classifier; "
            "FedFN normalises the features before it."
        )
    path, classifier = linear[-1]
    classifier.__class__ = DirectionLinear
    done = Replacement(path, "Linear", DirectionLinear.__name__)
    return replace(conversion, replaced=(*conversion.replaced, done))
