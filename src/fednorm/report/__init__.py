"""Reports: a comparison or a story as a table, as curves, and as one page that holds both."""

from fednorm.report.story_table import story_table
from fednorm.report.tables import table
from fednorm.report.write import write, write_story

__all__ = ["story_table", "table", "write", "write_story"]
