"""A story for the terminal: what was published, what was measured, and whether they agree."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.experiment.story import Panel, Story
from fednorm.report.agreement import agreement
from fednorm.report.colors import style
from fednorm.report.compared import compared, compared_exchanges
from fednorm.report.tables import STRATEGY, Cell, table


def story_table(story: Story) -> Group:
    """Return the panels one below the other."""
    return Group(*_parts(story))


def _parts(story: Story) -> Iterator[RenderableType]:
    for panel in story.panels:
        yield from _panel(panel)
        yield Text()


def _panel(panel: Panel) -> Iterator[RenderableType]:
    found = agreement(panel)
    if rows := compared_exchanges(panel):
        yield Text("Exchanges a round, published and counted", style="bold")
        yield _table(rows)
    title = f"{panel.title}: " if panel.title else ""
    if not found:
        yield Text(f"{title}{panel.comparison.metric}", style="bold")
        yield table(panel.comparison)
        return
    yield Text(f"{title}{panel.comparison.metric}, published and measured", style="bold")
    yield _table(compared(found, best=panel.best))
    yield Text(found.statement())


def _table(rows: Sequence[Mapping[str, Cell]]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for title in rows[0]:
        result.add_column(title, justify="left" if title == STRATEGY else "right")
    for row in rows:
        label = row[STRATEGY].text
        numbers = (Text(cell.text) for title, cell in row.items() if title != STRATEGY)
        result.add_row(Text(label, style=f"bold {style(label).color}"), *numbers)
    return result
