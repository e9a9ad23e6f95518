"""Aggregators of updates and statistics: one class and one line of the registry for each rule.

`create_aggregator` reads "median", "trimmed_mean(f=2)" or "nnm > trimmed_mean": pre-aggregations
in their order, then a rule.
"""

import ast
import re
from typing import Any

from fednorm.aggregators.base import Pipeline, PreAggregator, Rule, TooFewClientsError
from fednorm.aggregators.bucketing import Bucketing
from fednorm.aggregators.clipping import CenteredClipping, NormClipping
from fednorm.aggregators.coordinate_wise import Mean, MeanAroundMedian, Median, TrimmedMean
from fednorm.aggregators.geometric_median import GeometricMedian
from fednorm.aggregators.krum import Krum, MultiKrum
from fednorm.aggregators.nnm import NNM
from fednorm.core.aggregation import Aggregator, weighted_mean
from fednorm.errors import UnknownNameError
from fednorm.registry import create, find

__all__ = [
    "AGGREGATORS",
    "PRE_AGGREGATORS",
    "Pipeline",
    "TooFewClientsError",
    "check_client_count",
    "create_aggregator",
    "list_aggregators",
]

AGGREGATORS: dict[str, type[Rule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "mean_around_median": MeanAroundMedian,
    "geometric_median": GeometricMedian,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "centered_clipping": CenteredClipping,
}

PRE_AGGREGATORS: dict[str, type[PreAggregator]] = {
    "nnm": NNM,
    "bucketing": Bucketing,
    "norm_clipping": NormClipping,
}

_RENAMED = {"centred_clipping": "centered_clipping"}
_STAGE = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


def create_aggregator(text: str, f: int = 0) -> Aggregator:
    """Create the aggregator that `text` names.

    `f` is the number of Byzantine clients for every stage that does not set its own.

    >>> create_aggregator("nnm > trimmed_mean(f=1)", f=2)
    Pipeline(stages=(NNM(f=2),), rule=TrimmedMean(f=1))
    >>> create_aggregator("mean") is weighted_mean
    True
    """
    *before, last = text.split(">")
    stages = tuple(_create_stage("pre-aggregation", PRE_AGGREGATORS, part, f) for part in before)
    rule: Rule = _create_stage("aggregator", AGGREGATORS, last, f)
    if not stages and isinstance(rule, Mean):
        return weighted_mean
    return Pipeline(stages, rule) if stages else rule


def list_aggregators() -> list[str]:
    """Return the names of all aggregators, sorted, without pre-aggregations.

    >>> list_aggregators()[:3]
    ['centered_clipping', 'geometric_median', 'krum']
    """
    return sorted(AGGREGATORS)


def check_client_count(aggregator: Aggregator, n: int) -> None:
    """Raise TooFewClientsError if `n` clients are too few for the aggregator.

    >>> check_client_count(create_aggregator("trimmed_mean", f=2), 4)
    Traceback (most recent call last):
    ...
    fednorm.aggregators.base.TooFewClientsError: trimmed_mean with f=2 Byzantine clients needs \
at least 5 vectors, but it gets 4; lower f, choose another rule, or let more clients take part.
    """
    if isinstance(aggregator, Pipeline | Rule):
        aggregator.check(n)


def _create_stage(kind: str, registry: dict[str, type[Any]], text: str, f: int) -> Any:
    match = _STAGE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{kind} {text.strip()!r} is not a name with fields; "
            "write for example 'nnm > trimmed_mean(f=2)'."
        )
    name, fields = match.groups()
    if name in _RENAMED:
        raise UnknownNameError(f"{kind} {name!r} is now called {_RENAMED[name]!r}.")
    find(kind, registry, name)
    return create(kind, registry, name, {"f": f} | _parse_fields(name, fields or ""))


def _parse_fields(name: str, text: str) -> dict[str, Any]:
    fields = {}
    for part in filter(str.strip, text.split(",")):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or field in fields:
            raise ValueError(
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
