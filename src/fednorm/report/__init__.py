"""Reports: a comparison as a table, as curves, and as one page that holds both."""

from fednorm.report.tables import table
from fednorm.report.write import write

__all__ = ["table", "write"]
