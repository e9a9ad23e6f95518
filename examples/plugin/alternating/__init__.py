"""A strategy, an aggregator and a metric for fednorm; pyproject.toml gives their names."""
