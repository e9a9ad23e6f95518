"""Reports: a comparison or a story as a table, as curves, and as one page that holds both."""

from fednorm.report.tables import build_story_table, build_table
from fednorm.report.write import write_comparison, write_story

__all__ = ["build_story_table", "build_table", "write_comparison", "write_story"]
