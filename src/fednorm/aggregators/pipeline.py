"""Pre-aggregations and a rule, one after the other: what "nnm > trimmed_mean" names."""

from dataclasses import dataclass

from torch import Tensor

from fednorm.aggregators.base import PreAggregator, Rule, aggregated, check_stages


@dataclass(frozen=True)
class Pipeline:
    """Any number of pre-aggregations, then one rule."""

    stages: tuple[PreAggregator, ...]
    rule: Rule

    def check(self, n: int) -> None:
        """Raise TooFewClientsError unless n clients are enough for every stage."""
        check_stages(self.stages, self.rule, n)

    def without(self, faulty: int) -> "Pipeline":
        """Return the same for the vectors that are left after so many were found faulty."""
        stages = tuple(stage.without(faulty) for stage in self.stages)
        return Pipeline(stages, self.rule.without(faulty))

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate `[clients, *shape]` over the first axis; the weights are ignored."""
        del weights
        return aggregated(values, self.stages, self.rule)
