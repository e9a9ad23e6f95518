"""Aggregators of updates and statistics: one class and one line of the registry for each rule.

`create_aggregator` reads "median", "trimmed_mean(f=2)" or "nnm > trimmed_mean": pre-aggregations
in their order, then a rule.
"""

from typing import TYPE_CHECKING, Any

from fednorm.errors import ConfigError
from fednorm.registry import Registry, format_call, parse_call

if TYPE_CHECKING:
    from fednorm.aggregators.base import PreAggregator, Rule
    from fednorm.core.aggregation import Aggregator

__all__ = [
    "AGGREGATORS",
    "PRE_AGGREGATORS",
    "check_client_count",
    "create_aggregator",
    "format_aggregator",
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
        "geometric_median": "vector_wise:GeometricMedian",
        "krum": "vector_wise:Krum",
        "multi_krum": "vector_wise:MultiKrum",
        "centered_clipping": "vector_wise:CenteredClipping",
    },
    "fednorm.aggregators.base:Rule",
)

PRE_AGGREGATORS: "Registry[PreAggregator]" = Registry(
    "pre-aggregation",
    __name__,
    {
        "nnm": "vector_wise:NNM",
        "bucketing": "vector_wise:Bucketing",
        "norm_clipping": "vector_wise:NormClipping",
    },
    "fednorm.aggregators.base:PreAggregator",
)


def create_aggregator(text: str, f: int = 0) -> "Aggregator":
    """Create the aggregator that `text` names.

    `f` is the number of Byzantine clients for every stage that does not set its own. Your own class
    is "module:Class", as in "nnm > mine:Median(f=2)".

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
    rule: Any = _create_stage(AGGREGATORS, last, f)
    if not stages and isinstance(rule, Mean):
        return weighted_mean
    return Pipeline(stages, rule) if stages else rule


def format_aggregator(rule: Any) -> str:
    """Return an aggregator as text that `create_aggregator` reads.

    >>> format_aggregator(create_aggregator("nnm > trimmed_mean(f=2)"))
    'nnm > trimmed_mean(f=2)'
    """
    from fednorm.aggregators.base import Pipeline  # noqa: PLC0415 (as above)
    from fednorm.core.aggregation import WeightedMean  # noqa: PLC0415 (as above)

    if isinstance(rule, Pipeline):
        before = [format_call(PRE_AGGREGATORS.describe(stage)) for stage in rule.stages]
        return " > ".join([*before, format_aggregator(rule.rule)])
    return "mean" if isinstance(rule, WeightedMean) else format_call(AGGREGATORS.describe(rule))


def list_aggregators() -> list[str]:
    """Return the names of all aggregators, sorted, without pre-aggregations.

    >>> list_aggregators()[:3]
    ['centered_clipping', 'geometric_median', 'krum']
    """
    return sorted(AGGREGATORS.list_names())


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
    called = parse_call(text)
    if called is None:
        raise ConfigError(
            f"{registry.kind} {text.strip()!r} is not a name with fields; "
            "write for example 'nnm > trimmed_mean(f=2)'."
        )
    name, fields = called
    return registry.create(name, {"f": f} | fields)
