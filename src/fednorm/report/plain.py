"""A comparison that reproduces nothing, as a story: one panel without a title."""

from fednorm.experiment.result import Comparison
from fednorm.experiment.story import Panel, Story

QUESTION = "Which normalization survives these clients?"


def as_story(comparison: Comparison) -> Story:
    """Return the story of a comparison by itself."""
    return Story(
        title="",
        question=QUESTION,
        command="fednorm run config.toml",
        panels=(Panel("", comparison),),
    )
