"""Layers that normalise by a rule, and the surgery that puts them into a model."""
