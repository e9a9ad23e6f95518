"""Aggregators of updates and statistics: one class and one line of the registry for each rule.

`create_aggregator` reads "median", "trimmed_mean(f=2)" or "nnm > trimmed_mean": pre-aggregations
in their order, then a rule.
"""

import ast
import re
from typing import TYPE_CHECKING, Any

from fednorm.errors import ConfigError
from fednorm.registry import Registry, export_lazily

if TYPE_CHECKING:
    from fednorm.aggregators.base import Pipeline, PreAggregator, Rule
    from fednorm.core.aggregation import Aggregator

__all__ = [
    "AGGREGATORS",
    "PRE_AGGREGATORS",
    "Pipeline",
    "check_client_count",
    "create_aggregator",
    "list_aggregators",
]

AGGREGATORS: "Registry[Rule]" = Registry(
    "aggregator",
    __name__,
    {
        "mean": "coordinate_wise:Mean",
        "median": "coordinate_wise:Median",
        "trimmed_mean": "coordinate_wise:TrimmedMean",
        "mean_around_median": "coordinate_wise:MeanAroundMedian",
        "geometric_median": "geometric_median:GeometricMedian",
        "krum": "krum:Krum",
        "multi_krum": "krum:MultiKrum",
        "centered_clipping": "clipping:CenteredClipping",
    },
)

PRE_AGGREGATORS: "Registry[PreAggregator]" = Registry(
    "pre-aggregation",
    __name__,
    {
        "nnm": "mixing:NNM",
        "bucketing": "mixing:Bucketing",
        "norm_clipping": "clipping:NormClipping",
    },
)

__getattr__ = export_lazily(__name__, {"fednorm.aggregators.base": "Pipeline"})

_STAGE = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


def create_aggregator(text: str, f: int = 0) -> "Aggregator":
    """Create the aggregator that `text` names.

    `f` is the number of Byzantine clients for every stage that does not set its own.

    >>> create_aggregator("nnm > trimmed_mean(f=1)", f=2)
    Pipeline(stages=(NNM(f=2),), rule=TrimmedMean(f=1))
    >>> create_aggregator("mean")
    WeightedMean()
    """
    from fednorm.aggregators.base import Pipeline  # noqa: PLC0415 (names are listed without torch)
    from fednorm.aggregators.coordinate_wise import Mean  # noqa: PLC0415 (as above)
    from fednorm.core.aggregation import weighted_mean  # noqa: PLC0415 (as above)

    *before, last = text.split(">")
    stages = tuple(_create_stage(PRE_AGGREGATORS, part, f) for part in before)
    rule: Rule = _create_stage(AGGREGATORS, last, f)
    if not stages and isinstance(rule, Mean):
        return weighted_mean
    return Pipeline(stages, rule) if stages else rule


def list_aggregators() -> list[str]:
    """Return the names of all aggregators, sorted, without pre-aggregations.

    >>> list_aggregators()[:3]
    ['centered_clipping', 'geometric_median', 'krum']
    """
    return sorted(AGGREGATORS)


def check_client_count(aggregator: "Aggregator", n: int) -> None:
    """Raise TooFewClientsError if `n` clients are too few for the aggregator.

    >>> check_client_count(create_aggregator("trimmed_mean", f=2), 4)
    Traceback (most recent call last):
    ...
    fednorm.errors.TooFewClientsError: trimmed_mean with f=2 Byzantine clients needs \
at least 5 vectors, but it gets 4; lower f, choose another rule, or let more clients take part.
    """
    from fednorm.aggregators.base import Pipeline, Rule  # noqa: PLC0415 (as above)

    if isinstance(aggregator, Pipeline | Rule):
        aggregator.check(n)


def _create_stage(registry: "Registry[Any]", text: str, f: int) -> Any:
    match = _STAGE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{registry.kind} {text.strip()!r} is not a name with fields; "
            "write for example 'nnm > trimmed_mean(f=2)'."
        )
    name, fields = match.groups()
    registry.locate(name)
    return registry.create(name, {"f": f} | _parse_fields(name, fields or ""))


def _parse_fields(name: str, text: str) -> dict[str, Any]:
    fields = {}
    for part in filter(str.strip, text.split(",")):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or field in fields:
            raise ConfigError(
                f"{name} got {part.strip()!r}, which is not a field or is set twice; "
                f"write for example '{name}(f=2)'."
            )
        fields[field] = _parse_value(value)
    return fields


def _parse_value(text: str) -> Any:
    """Parse a number or None; return any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
