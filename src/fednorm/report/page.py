"""A comparison as one HTML file: no script, no request, light and dark, phone and paper."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files

from fednorm.experiment.result import Comparison, RunResult
from fednorm.report.colors import style
from fednorm.report.diagnostics import diagnostics_svg, explanation
from fednorm.report.numbers import percent
from fednorm.report.plots import curves_svg
from fednorm.report.setting import flatten, setting
from fednorm.report.tables import NOTE, STRATEGY, caption, columns, rows
from fednorm.report.verdict import caveats, verdict

QUESTION = "Which normalization survives these clients?"


def page(comparison: Comparison) -> str:
    """Return the page; all that comes from labels, config and errors is escaped."""
    where = escape(setting(comparison.config))
    css = files("fednorm.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = (
        f'<h1>{QUESTION}</h1>\n<p class="setting">{where}</p>',
        f'<p class="verdict">{escape(verdict(comparison))}</p>',
        _caveats(comparison),
        _curves(comparison),
        _table(comparison),
        _diagnostics(comparison),
        _failures(comparison),
        _clients(comparison),
        _what_was_run(comparison),
    )
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{QUESTION}{' – ' + where if where else ''}</title>\n"
        f"<style>\n{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _caveats(comparison: Comparison) -> str:
    text = " ".join(caveats(comparison))
    return f'<p class="caveats">{escape(text)}</p>' if text else ""


def _curves(comparison: Comparison) -> str:
    band = " Bands reach from the lowest to the highest seed."
    many = len({run.seed for run in comparison.runs}) > 1
    return (
        f'<h2>Accuracy by round</h2>\n<figure>\n<div class="box">{curves_svg(comparison)}</div>\n'
        f"<figcaption>Accuracy on test data.{band if many else ''}</figcaption>\n</figure>"
    )


def _table(comparison: Comparison) -> str:
    titles = columns(comparison)
    head = "".join(f'<th scope="col"{_kind(title)}>{title}</th>' for title in titles)
    body = "\n".join(_row(row) for row in rows(comparison))
    return (
        f'<h2>Results</h2>\n<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
        f'<p class="caption">{caption(comparison)}</p>'
    )


def _row(row: Mapping[str, str]) -> str:
    label = row[STRATEGY]
    key = f'<span class="key" style="color: {style(label).color}"></span>'
    name = f'<th scope="row" class="name">{key}{escape(label)}</th>'
    cells = (f"<td{_kind(k)}>{escape(v)}</td>" for k, v in row.items() if k != STRATEGY)
    return f"<tr>{name}{''.join(cells)}</tr>"


def _kind(title: str) -> str:
    kinds = {STRATEGY: "", NOTE: ' class="note"'}
    return kinds.get(title, ' class="number"')


def _diagnostics(comparison: Comparison) -> str:
    drawn = diagnostics_svg(comparison)
    if not drawn:
        return ""
    return (
        f'<h2>Diagnostics</h2>\n<figure>\n<div class="box">{drawn}</div>\n'
        f"<figcaption>{explanation(comparison)}</figcaption>\n</figure>"
    )


def _failures(comparison: Comparison) -> str:
    failed = [run for run in comparison.runs if run.status != "finished"]
    items = "\n".join(_failure(run) for run in failed)
    return f"<h2>Failures</h2>\n<ul>\n{items}\n</ul>" if failed else ""


def _failure(run: RunResult) -> str:
    rounds = f"{run.rounds} round{'' if run.rounds == 1 else 's'}"
    head = f"<strong>{escape(run.strategy)}</strong>, seed {run.seed}: {run.status} after {rounds}"
    return f"<li>{head}{f'<pre>{escape(run.error)}</pre>' if run.error else ''}</li>"


def _clients(comparison: Comparison) -> str:
    finals = ((run, run.final.per_client) for run in comparison.runs if run.final)
    listed = {
        f"{run.strategy}, seed {run.seed}": " · ".join(percent(value) for value in values)
        for run, values in finals
        if values
    }
    if not listed:
        return ""
    return (
        f"<h2>Accuracy of each client</h2>\n{_definitions(listed)}\n"
        '<p class="caption">In %, each client on its own test split, at the last evaluation.</p>'
    )


def _what_was_run(comparison: Comparison) -> str:
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in comparison.runs}))
    return (
        "<h2>What was run</h2>\n<p>To repeat it:</p>\n"
        "<pre><code>fednorm run config.toml</code></pre>\n"
        f"<h3>Config</h3>\n{_definitions(flatten(comparison.config))}\n"
        f"<h3>Seeds and versions</h3>\n"
        f"{_definitions({'seeds': seeds or 'none', **comparison.environment})}"
    )


def _definitions(pairs: Mapping[str, str]) -> str:
    items = (
        f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in pairs.items()
    )
    return "<dl>\n" + "\n".join(items) + "\n</dl>"
