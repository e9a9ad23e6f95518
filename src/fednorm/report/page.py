"""A story as one HTML file: no request, light and dark, phone and paper, with or without script.

The sections stand in the order of the page; below them are the elements of which they are made,
which escape all text that comes from labels, configs and errors.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files

from fednorm.experiment.results import FigureResult, PanelResult, RunResult
from fednorm.report.agreement import RULE, compare_published
from fednorm.report.curves import NARROW, WIDE, render_panel
from fednorm.report.diagnostic_plots import (
    explain_diagnostics,
    list_diagnosed,
    render_diagnostics,
)
from fednorm.report.final_values import render_final_values
from fednorm.report.format import (
    capitalize,
    describe_setting,
    flatten,
    format_percent,
    split_common,
)
from fednorm.report.heatmaps import describe_gaps, render_gap_maps, render_grid_maps
from fednorm.report.series import Plots, collect_plots
from fednorm.report.styles import Style, draw_swatch
from fednorm.report.tables import (
    NOTE,
    STRATEGY,
    Cell,
    compare_accuracies,
    compare_exchanges,
    fill_cells,
    list_columns,
    write_caption,
)
from fednorm.report.verdict import list_caveats, state_verdict

Looks = Mapping[str, Style]  # of all methods of the page, by label

_HINT = "Point at the curves, or focus them and use the arrow keys, for values. "


def render_page(story: FigureResult) -> str:
    """Return the page; all that comes from labels, config and errors is escaped."""
    drawn = collect_plots(story)
    body = "\n".join(section for section in _write_sections(story, drawn) if section)
    name = story.title or next(iter(_list_settings(story)), "")
    title = " – ".join(filter(None, (story.question, name)))
    script = _read_file("page.js")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_make_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_read_file('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="story">{_embed(drawn)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _write_sections(story: FigureResult, drawn: Plots) -> Iterator[str]:
    yield from _introduce(story)
    yield from _list_cuts(story)
    yield from _show_finals(story, drawn)
    yield from _show_gap_maps(story)
    yield from _show_grid_maps(story)
    yield from _show_curves(story, drawn)
    yield from _compare_published(story, drawn)
    yield from _compare_exchanges(story, drawn)
    yield from _show_results(story, drawn)
    yield from _show_diagnostics(story, drawn)
    yield from _list_failures(story)
    yield from _list_clients(story)
    yield from _show_setup(story)


def _read_file(name: str) -> str:
    return files("fednorm.report").joinpath(name).read_text(encoding="utf-8")


def _make_policy(script: str) -> str:
    """Forbid every request, and every script but this one.

    Styles may be inline, since matplotlib writes them so; without requests they can do no harm.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _embed(drawn: Plots) -> str:
    """Return JSON that cannot end its script element, whatever the labels are."""
    text = json.dumps(drawn.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _introduce(story: FigureResult) -> Iterator[str]:
    """Ask the question, answer it panel by panel, and list what qualifies the answer."""
    yield _paragraph("title", story.title)
    yield _heading(1, story.question)
    if len(settings := _list_settings(story)) == 1:
        yield _paragraph("setting", settings[0])
    if story.source:
        yield _paragraph("setting", f"Published in: {story.source}")
    if sentence := describe_gaps(story):
        yield _paragraph("verdict", sentence)
    else:
        yield from (_state_verdict(panel) for panel in story.panels)
    for sentence in _say_once(story, [list_caveats(panel.comparison) for panel in story.panels]):
        yield _paragraph("caveats", sentence)


def _state_verdict(panel: PanelResult) -> str:
    title = f"<b>{escape(panel.title)}</b> " if panel.title else ""
    found = compare_published(panel)
    order = f" <em>{escape(found.statement())}</em>" if found else ""
    # A number stays on one line with its spread and sign.
    text = state_verdict(panel.comparison).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    return f'<p class="verdict">{title}{escape(text)}{order}</p>'


def _list_cuts(story: FigureResult) -> Iterator[str]:
    """Say how the setting differs from the published one."""
    if story.cuts:
        yield _heading(2, "What was cut")
        yield _list([escape(cut) for cut in story.cuts], "cuts")


def _say_once(story: FigureResult, sentences: Sequence[Sequence[str]]) -> Iterator[str]:
    """Join the sentences of the panels, each once, with the panels that it is true of."""
    for sentence in dict.fromkeys(s for some in sentences for s in some):
        of = [p.title for p, some in zip(story.panels, sentences, strict=True) if sentence in some]
        everywhere = len(of) == len(story.panels)
        yield sentence if everywhere else f"{', '.join(of)}: {sentence}"


def _show_finals(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Show final values against what the panels differ in."""
    if drawn.finals:
        yield _heading(2, f"Final {drawn.finals.metric} by {drawn.finals.axis}")
        yield _legend(drawn.looks, drawn.finals.lines, {})
        wide = f'<div class="wide">{render_final_values(drawn, WIDE)}</div>'
        narrow = f'<div class="narrow">{render_final_values(drawn, NARROW)}</div>'
        yield f'<div class="plots alone"><figure class="finals">{wide}{narrow}</figure></div>'
        hollow = " Hollow markers are published numbers." if drawn.finals.published else ""
        yield _paragraph("caption", f"{_name_metrics(story)} at the last evaluation.{hollow}")


def _show_gap_maps(story: FigureResult) -> Iterator[str]:
    """Show by how many points one method is ahead of another, panel by panel."""
    if story.heat and (drawn := render_gap_maps(story)):
        ahead, behind = story.heat
        yield _heading(2, f"{ahead} against {behind}")
        yield f'<figure class="finals">{drawn}</figure>'
        yield _paragraph(
            "caption", f"Points by which {ahead} ends above {behind}; green where it ends below."
        )


def _show_grid_maps(story: FigureResult) -> Iterator[str]:
    """Show final values of a comparison that was swept over attacks and defences."""
    if drawn := render_grid_maps(story):
        yield _heading(2, "Attacks and defences")
        yield f'<figure class="finals">{drawn}</figure>'
        yield _paragraph(
            "caption", f"Final {_name_metrics(story).lower()} in %: attacks down, defences across."
        )


def _show_curves(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Show the curves of every panel under one legend."""
    if not drawn.panels and (drawn.finals or story.heat):
        return
    yield _heading(2, f"{_name_metrics(story)} by round")
    marks = {
        "diverged": "×" if any(plot.ends for plot in drawn.panels) else "",
        "published": "- -" if any(plot.published for plot in drawn.panels) else "",
    }
    yield _legend(drawn.looks, drawn.drawn, {k: v for k, v in marks.items() if v})
    alone = len(drawn.panels) == 1
    yield f'<div class="plots{" alone" if alone else ""}">'
    for number, (panel, plot) in enumerate(zip(story.curve_panels, drawn.panels, strict=True)):
        wide = f'<div class="wide">{render_panel(drawn, plot, WIDE)}</div>' if alone else ""
        narrow = f'<div class="narrow">{render_panel(drawn, plot, NARROW)}</div>'
        yield f"<figure>{_heading(3, panel.title)}"
        if len(_list_settings(story)) > 1:
            yield _paragraph("setting", describe_setting(panel.comparison.config))
        yield f'<div class="plot" data-panel="{number}">{wide}{narrow}</div></figure>'
    yield "</div>"
    many = any(len({run.seed for run in p.comparison.runs}) > 1 for p in story.panels)
    band = " Lines are means over seeds; bands reach from the lowest to the highest seed."
    dashes = " Dashes at the right are published numbers." if marks["published"] else ""
    text = f"{_name_metrics(story)} on test data.{band if many else ''}{dashes}"
    yield f'<p class="caption"><span class="hint">{_HINT}</span>{text}</p>'


def _list_settings(story: FigureResult) -> list[str]:
    return list(dict.fromkeys(describe_setting(panel.comparison.config) for panel in story.panels))


def _name_metrics(story: FigureResult) -> str:
    names = dict.fromkeys(panel.comparison.metric for panel in story.panels)
    return capitalize(" and ".join(names) or "accuracy")


def _compare_published(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Put published and measured numbers side by side."""
    if not any(panel.published for panel in story.panels):
        return
    yield _heading(2, f"{_name_metrics(story)}, published and measured")
    yield '<div class="pairs">'
    for panel in story.panels:
        if found := compare_published(panel):
            rows = compare_accuracies(found, best=panel.best)
            yield f"<section>{_heading(3, panel.title)}"
            yield f"{_table(list(rows[0]), rows, drawn.looks)}</section>"
    yield "</div>"
    yield _paragraph("caption", f"Gap: measured minus published, in points. {RULE}")


def _compare_exchanges(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Put published and measured numbers of exchanges side by side."""
    for panel in story.panels:
        if rows := compare_exchanges(panel):
            yield _heading(2, "Exchanges a round, published and measured")
            yield _heading(3, panel.title)
            yield _table(list(rows[0]), rows, drawn.looks)


def _show_results(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Show the table of every panel."""
    yield _heading(2, "Results")
    for panel in story.panels:
        yield _heading(3, panel.title)
        yield _table(list_columns(panel.comparison), fill_cells(panel.comparison), drawn.looks)
    for sentences in _say_once(
        story, [[write_caption(panel.comparison)] for panel in story.panels]
    ):
        yield _paragraph("caption", sentences)


def _show_diagnostics(story: FigureResult, drawn: Plots) -> Iterator[str]:
    """Show what was recorded of statistics and gradients."""
    recorded = [panel for panel in story.panels if list_diagnosed(panel.comparison)]
    if recorded:
        yield _heading(2, "Diagnostics")
    for number, panel in enumerate(recorded):
        yield _heading(3, panel.title)
        yield _legend(drawn.looks, list_diagnosed(panel.comparison), {})
        plots = render_diagnostics(panel.comparison, drawn.looks, str(number))
        figures = (f"<figure>{_heading(4, title)}{svg}</figure>" for title, svg in plots.items())
        yield f'<div class="plots small">{"".join(figures)}</div>'
        yield _paragraph("caption", explain_diagnostics(panel.comparison))


def _list_failures(story: FigureResult) -> Iterator[str]:
    """List the runs that did not finish, with the whole message."""
    failed = [
        _describe_failure(run, panel.title)
        for panel in story.panels
        for run in panel.comparison.runs
        if run.status != "finished"
    ]
    if failed:
        yield _heading(2, "Failures")
        yield _list(failed, "failures")


def _describe_failure(run: RunResult, where: str) -> str:
    rounds = f"{run.rounds} round{'' if run.rounds == 1 else 's'}"
    place = f"{escape(where)}, " if where else ""
    head = f"<strong>{escape(run.strategy)}</strong>, {place}seed {run.seed}: {run.status}"
    message = f"<pre>{escape(run.error)}</pre>" if run.error else ""
    return f"{head} after {rounds}{message}"


def _list_clients(story: FigureResult) -> Iterator[str]:
    """List what each client reaches, where that was measured."""
    listed = {
        ", ".join(filter(None, (panel.title, run.strategy, f"seed {run.seed}"))): " · ".join(
            format_percent(value) for value in run.final.per_client
        )
        for panel in story.panels
        for run in panel.comparison.runs
        if run.final and run.final.per_client
    }
    if listed:
        yield _heading(2, f"{_name_metrics(story)} of each client")
        yield _definitions(listed)
        told = [
            [f"In %, each client on {panel.comparison.tested_on}, at the last evaluation."]
            for panel in story.panels
        ]
        for sentence in _say_once(story, told):
            yield _paragraph("caption", sentence)


def _show_setup(story: FigureResult) -> Iterator[str]:
    """Give command, config, seeds and versions; what panels share stands there once."""
    yield _heading(2, "What was run")
    yield "<p>To repeat it:</p>"
    yield f"<pre><code>{escape(story.command)}</code></pre>"
    shared, own = split_common([flatten(panel.comparison.config) for panel in story.panels])
    yield _heading(3, "Config")
    yield _definitions(shared)
    for panel, values in zip(story.panels, own, strict=True):
        if values:
            yield _heading(4, panel.title)
            yield _definitions(values)
    runs = [run for panel in story.panels for run in panel.comparison.runs]
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    versions, _ = split_common([panel.comparison.environment for panel in story.panels])
    yield _heading(3, "Seeds and versions")
    yield _definitions({"seeds": seeds or "none", **versions})


def _heading(level: int, text: str) -> str:
    """Return a heading, or nothing for an empty text."""
    return f"<h{level}>{escape(text)}</h{level}>" if text else ""


def _paragraph(kind: str, text: str) -> str:
    """Return a paragraph of that class, or nothing for an empty text."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _list(items: Iterable[str], kind: str) -> str:
    """Return a list of that class; the items are HTML."""
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"


def _definitions(pairs: Mapping[str, str]) -> str:
    """Return names and what they stand for."""
    items = (
        f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in pairs.items()
    )
    return "<dl>\n" + "\n".join(items) + "\n</dl>"


def _legend(looks: Looks, shown: Iterable[str], more: Mapping[str, str]) -> str:
    """Return the methods to be shown, and further marks that are the same for all of them.

    The page's script makes buttons of the methods.
    """
    chosen = set(shown)
    methods = [
        f'<li data-method="{number}">{draw_swatch(look)}<span>{escape(label)}</span></li>'
        for number, (label, look) in enumerate(looks.items())
        if label in chosen
    ]
    marks = [
        f'<li class="mark"><b>{mark}</b><span>{name}</span></li>' for name, mark in more.items()
    ]
    return '<ul class="legend">\n' + "\n".join([*methods, *marks]) + "\n</ul>"


def _table(titles: Sequence[str], rows: Iterable[Mapping[str, Cell]], looks: Looks) -> str:
    """Return a table whose first column names the methods."""
    head = "".join(
        f'<th scope="col"{_column_class(title)}>{escape(title)}</th>' for title in titles
    )
    body = "\n".join(_table_row(row, looks) for row in rows)
    return (
        f'<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _table_row(row: Mapping[str, Cell], looks: Looks) -> str:
    label = row[STRATEGY].text
    number = list(looks).index(label)
    name = f'<th scope="row" class="name">{draw_swatch(looks[label])}{escape(label)}</th>'
    cells = (
        f"<td{_column_class(title)}{_cell_value(cell)}>{escape(cell.text)}</td>"
        for title, cell in row.items()
        if title != STRATEGY
    )
    return f'<tr data-method="{number}">{name}{"".join(cells)}</tr>'


def _column_class(title: str) -> str:
    kinds = {STRATEGY: "", NOTE: ' class="note"'}
    return kinds.get(title, ' class="number"')


def _cell_value(cell: Cell) -> str:
    return "" if cell.value is None else f' data-value="{cell.value!r}"'
