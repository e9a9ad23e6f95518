"""The look of the tables."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

_TEXT = {"layer", "type", "place", "strategy", "statistics", "kind", "keeps", "note"}


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; columns of text are left-justified, numbers are not."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    for column in columns:
        # A number that is broken would be read as another number.
        text = column in _TEXT
        table.add_column(
            column,
            justify="left" if text else "right",
            no_wrap=column != "note",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
