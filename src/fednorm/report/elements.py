"""The parts of which the page is made; all text that comes from outside is escaped here."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from fednorm.report.colors import Style
from fednorm.report.swatch import swatch
from fednorm.report.tables import NOTE, STRATEGY, Cell

Looks = Mapping[str, Style]  # of all methods of the page, by label


def heading(level: int, text: str) -> str:
    """Return a heading, or nothing for an empty text."""
    return f"<h{level}>{escape(text)}</h{level}>" if text else ""


def paragraph(kind: str, text: str) -> str:
    """Return a paragraph of that class, or nothing for an empty text."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def listing(items: Iterable[str], kind: str) -> str:
    """Return a list of that class; the items are HTML."""
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def definitions(pairs: Mapping[str, str]) -> str:
    """Return names and what they stand for."""
    items = (
        f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in pairs.items()
    )
    return "<dl>\n" + "\n".join(items) + "\n</dl>"


def legend(looks: Looks, shown: Iterable[str], more: Mapping[str, str]) -> str:
    """Return the methods to be shown, and further marks that are the same for all of them.

    The page's script makes buttons of the methods.
    """
    chosen = set(shown)
    methods = [
        f'<li data-method="{number}">{swatch(look)}<span>{escape(label)}</span></li>'
        for number, (label, look) in enumerate(looks.items())
        if label in chosen
    ]
    marks = [
        f'<li class="mark"><b>{mark}</b><span>{name}</span></li>' for name, mark in more.items()
    ]
    return '<ul class="legend">\n' + "\n".join([*methods, *marks]) + "\n</ul>"


def table(titles: Sequence[str], rows: Iterable[Mapping[str, Cell]], looks: Looks) -> str:
    """Return a table whose first column names the methods."""
    head = "".join(f'<th scope="col"{_kind(title)}>{escape(title)}</th>' for title in titles)
    body = "\n".join(_row(row, looks) for row in rows)
    return (
        f'<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _row(row: Mapping[str, Cell], looks: Looks) -> str:
    label = row[STRATEGY].text
    number = list(looks).index(label)
    name = f'<th scope="row" class="name">{swatch(looks[label])}{escape(label)}</th>'
    cells = (
        f"<td{_kind(title)}{_value(cell)}>{escape(cell.text)}</td>"
        for title, cell in row.items()
        if title != STRATEGY
    )
    return f'<tr data-method="{number}">{name}{"".join(cells)}</tr>'


def _kind(title: str) -> str:
    kinds = {STRATEGY: "", NOTE: ' class="note"'}
    return kinds.get(title, ' class="number"')


def _value(cell: Cell) -> str:
    return "" if cell.value is None else f' data-value="{cell.value!r}"'
