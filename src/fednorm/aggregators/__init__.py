"""Aggregators of updates and statistics: one line for each."""

from fednorm.core.aggregator import Aggregator, weighted_mean

AGGREGATORS: dict[str, Aggregator] = {"mean": weighted_mean}
