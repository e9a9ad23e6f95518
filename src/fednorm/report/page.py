"""Render a report as one offline HTML file, for screen, phone and paper, script optional.

This module gathers the values; `report.html.j2` turns them into HTML and escapes all text.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fednorm.experiment.results import Comparison, FigureResult, PanelResult
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.summary.result_table import format_percent, write_csv
from fednorm.report.clients import (
    describe_labels,
    list_client_values,
    render_labels,
    render_strip,
)
from fednorm.report.curves import (
    NARROW,
    WIDE,
    explain_diagnostics,
    list_diagnosed,
    overlap,
    render_diagnostics,
    render_errors,
    render_final_values,
    render_panel,
    render_sensitivity,
)
from fednorm.report.format import capitalize, describe_setting, flatten, format_toml, split_common
from fednorm.report.heatmaps import (
    describe_gaps,
    describe_grid,
    find_swept,
    render_gap_maps,
    render_grid_maps,
)
from fednorm.report.ranking import write_headline
from fednorm.report.series import Plots, collect_plots
from fednorm.report.tables import (
    NOTE,
    STRATEGY,
    compare_accuracies,
    compare_exchanges,
    fill_rows,
    group_rows,
    list_columns,
    write_caption,
)
from fednorm.report.verdict import RULE, compare_published, list_caveats, state_verdict

_ALWAYS = ("strategies", "data.name", "model.name", "partition", "clients", "rounds", "seeds")
_MOST_PANELS = 6  # whose clients are plotted


def render_page(figure: FigureResult, png: bytes = b"") -> str:
    """Return the page as HTML; `png` is the figure that it offers for download."""
    plots = collect_plots(figure)
    drawn = _draw_plots(figure, plots)
    svg = drawn["curves"][0]["wide"] if len(drawn["curves"]) == 1 and plots.drawn else ""
    script = _read_file("page.js")
    settings = [_describe(panel) for panel in figure.panels]
    metrics = dict.fromkeys(panel.comparison.metric for panel in figure.panels)
    return _load_template().render(
        figure=figure,
        sensitivity=render_sensitivity(figure),
        plots=plots,
        policy=_make_policy(script),
        css=_read_file("page.css"),
        script=script,
        settings=list(dict.fromkeys(settings)),
        metrics=capitalize(" and ".join(metrics) or "accuracy"),
        **_introduce(figure),
        downloads=list_downloads(figure, png=png, svg=svg),
        **drawn,
        **_fill_tables(figure),
        **_list_runs(figure),
        **_show_clients(figure, plots),
        **_describe_setup(figure),
    )


@cache
def _load_template() -> Template:
    environment = Environment(
        loader=PackageLoader("fednorm.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals |= {"STRATEGY": STRATEGY, "NOTE": NOTE, "RULE": RULE}
    return environment.get_template("report.html.j2")


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


def _introduce(figure: FigureResult) -> dict[str, Any]:
    """Answer the question, and list what qualifies the answer.

    A comparison of the user's has its outcome as heading. A published figure has its question, and
    the outcomes of its panels below; numbers of a smoke run have no outcome.
    """
    caveats = [list_caveats(panel.comparison) for panel in figure.panels]
    qualified = {"caveats": _merge_sentences(figure, caveats)}
    if not figure.title and len(figure.panels) == 1:
        comparison = figure.panels[0].comparison
        heading = _tell_outcome(comparison)
        told = _bind_numbers(state_verdict(comparison))
        details = "" if find_swept(figure) or told == f"{heading}." else told
        headed = {"kicker": figure.question, "heading": heading}
        return {**headed, "verdicts": [("", details, "")], **qualified}
    gaps = describe_gaps(figure)
    verdicts = [("", gaps, "")] if gaps else [_state_verdict(panel) for panel in figure.panels]
    headed = {"kicker": figure.title, "heading": figure.question}
    return {**headed, "verdicts": [] if figure.smoke else verdicts, **qualified}


def _tell_outcome(comparison: Comparison) -> str:
    return _bind_numbers(describe_grid(comparison) or write_headline(comparison))


def _state_verdict(panel: PanelResult) -> tuple[str, str, str]:
    """Return the panel's title, its outcome, and whether the order is the published one."""
    found = compare_published(panel)
    return panel.title, f"{_tell_outcome(panel.comparison)}.", found.describe() if found else ""


def _bind_numbers(text: str) -> str:
    """Keep a number on one line with its spread and unit."""
    for sign in (" ± ", " %", " points"):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return text


def _describe(panel: PanelResult) -> str:
    return describe_setting(panel.comparison.config, panel.comparison.label_counts)


def _merge_sentences(figure: FigureResult, sentences: Sequence[Sequence[str]]) -> list[str]:
    """Return the sentences of all panels, each once, with the panels that it is true of."""
    merged = []
    for sentence in dict.fromkeys(s for some in sentences for s in some):
        of = [p.title for p, some in zip(figure.panels, sentences, strict=True) if sentence in some]
        everywhere = len(of) == len(figure.panels)
        merged.append(sentence if everywhere else f"{', '.join(of)}: {sentence}")
    return merged


def _draw_plots(figure: FigureResult, plots: Plots) -> dict[str, Any]:
    """Return all plots as SVG elements."""
    marks = {
        "diverged": "×" if any(plot.ends for plot in plots.panels) else "",
        "published": "- -" if any(plot.published for plot in plots.panels) else "",
    }
    sizes = {"wide": WIDE, "narrow": NARROW}
    alone = len(plots.panels) == 1
    return {
        "finals": {name: render_final_values(plots, size) for name, size in sizes.items()}
        if plots.finals
        else None,
        "gap_maps": render_gap_maps(figure),
        "grid_maps": render_grid_maps(figure),
        "curves": [
            {
                "title": panel.title,
                "setting": _describe(panel),
                "wide": render_panel(plots, plot, WIDE) if alone else "",
                "narrow": render_panel(plots, plot, NARROW),
                "errors": {
                    name: render_errors(plots, plot, size)
                    for name, size in sizes.items()
                    if plot.lines and (alone or size == NARROW)
                },
                "overlap": overlap(plots, plot),
            }
            for panel, plot in zip(figure.curve_panels, plots.panels, strict=True)
        ],
        "marks": {name: mark for name, mark in marks.items() if mark},
        "many_seeds": any(len({run.seed for run in p.comparison.runs}) > 1 for p in figure.panels),
        "diagnostics": _draw_diagnostics(figure, plots),
    }


def _draw_diagnostics(figure: FigureResult, plots: Plots) -> list[dict[str, Any]]:
    diagnosed = [panel for panel in figure.panels if list_diagnosed(panel.comparison)]
    return [
        {
            "title": panel.title,
            "methods": list_diagnosed(panel.comparison),
            "plots": render_diagnostics(panel.comparison, plots.styles, str(number)),
            "caption": explain_diagnostics(panel.comparison),
        }
        for number, panel in enumerate(diagnosed)
    ]


def _fill_tables(figure: FigureResult) -> dict[str, Any]:
    """Return the tables of published and of measured numbers, by panel."""
    found = [(panel, compare_published(panel)) for panel in figure.panels]
    exchanges = [(panel.title, compare_exchanges(panel)) for panel in figure.panels]
    results = [
        (panel.title, list_columns(panel.comparison), group_rows(panel.comparison))
        for panel in figure.panels
    ]
    return {
        "published": [(p.title, compare_accuracies(one, best=p.best)) for p, one in found if one],
        "exchanges": [(title, rows) for title, rows in exchanges if rows],
        "results": results,
        "best_marked": not figure.smoke and any(g.best for _, _, of in results for g in of),
        "result_captions": _merge_sentences(
            figure, [[write_caption(panel.comparison)] for panel in figure.panels]
        ),
    }


def _list_runs(figure: FigureResult) -> dict[str, Any]:
    """Return the runs that did not finish."""
    runs = [(panel.title, run) for panel in figure.panels for run in panel.comparison.runs]
    return {"failures": [(title, run) for title, run in runs if not run.completed]}


def _show_clients(figure: FigureResult, plots: Plots) -> dict[str, Any]:
    """Return what data each client has and, where it was measured, what each client reaches."""
    shown = list(enumerate(figure.curve_panels[:_MOST_PANELS]))
    runs = [(p.title, run) for p in figure.panels for run in p.comparison.runs]
    tested = [
        [f"Each client on {panel.comparison.tested_on}, at the last evaluation."]
        for panel in figure.panels
    ]
    return {
        "label_plots": [
            (p.title, render_labels(counts, str(number)), describe_labels(p.comparison))
            for number, p in shown
            if (counts := p.comparison.label_counts)
        ],
        "strips": [
            (p.title, render_strip(p.comparison, plots, str(number)))
            for number, p in shown
            if list_client_values(p.comparison)
        ],
        "clients": {
            ", ".join(filter(None, (title, run.strategy, f"seed {run.seed}"))): " · ".join(
                format_percent(value) for value in run.final.per_client
            )
            for title, run in runs
            if run.final and run.final.per_client and run.delta is None
        },
        "client_captions": _merge_sentences(figure, tested),
    }


@cache
def _list_defaults() -> dict[str, Any]:
    return flatten(Experiment().model_dump(mode="json", exclude_none=True))


def _describe_setup(figure: FigureResult) -> dict[str, Any]:
    """Return config, conversions, seeds and versions; what all panels share is listed once."""
    configs = [flatten(panel.comparison.config) for panel in figure.panels]
    shared, own = split_common([{k: _write_value(v) for k, v in one.items()} for one in configs])
    versions, _ = split_common([panel.comparison.environment for panel in figure.panels])
    runs = [run for panel in figure.panels for run in panel.comparison.runs]
    seeds = sorted({run.seed for run in runs})
    raw = configs[0] if configs else {}
    usual = _list_defaults()
    changed = [k for k in shared if k in _ALWAYS or k not in usual or usual[k] != raw[k]]
    return {
        "config": {k: shared[k] for k in changed},
        "defaults": {k: v for k, v in shared.items() if k not in changed},
        "conversions": {run.strategy: "; ".join(run.conversion) for run in runs if run.conversion},
        "panel_configs": [(p.title, values) for p, values in zip(figure.panels, own, strict=True)],
        "versions": {"seeds": ", ".join(map(str, seeds)) or "none", **versions},
    }


def _write_value(value: Any) -> str:
    """Write a value as TOML; a table with nothing but a name as the name."""
    if not isinstance(value, list):
        return format_toml(value)
    names = [v["name"] if isinstance(v, Mapping) and list(v) == ["name"] else v for v in value]
    return format_toml(names)


# Downloads: the page works without a network, so its files are part of it.
_BY_ROUND = ("panel", "strategy", "seed", "round", "accuracy", "loss", "train_loss")


def list_downloads(figure: FigureResult, *, png: bytes, svg: str) -> dict[str, str]:
    """Return the links by file name; a figure that is not given has none."""
    contents: dict[str, tuple[str, bytes]] = {
        "results.csv": ("text/csv", _write_results(figure).encode()),
        "curves.csv": ("text/csv", _write_curves(figure).encode()),
        "curves.svg": ("image/svg+xml", svg.encode()),
        "curves.png": ("image/png", png),
    }
    if len(figure.panels) == 1:
        config = tomli_w.dumps(_drop_missing(figure.panels[0].comparison.config))
        contents["config.toml"] = ("application/toml", config.encode())
    return {
        name: f"data:{kind};base64,{b64encode(content).decode()}"
        for name, (kind, content) in contents.items()
        if content
    }


def _write_results(figure: FigureResult) -> str:
    rows = [
        {"panel": panel.title, **row}
        for panel in figure.panels
        for row in fill_rows(panel.comparison)
    ]
    return write_csv(rows)


def _write_curves(figure: FigureResult) -> str:
    """Write every evaluation of every run; accuracies are fractions, unrounded."""
    values = (
        (panel.title, run.strategy, run.seed, e.round, e.accuracy, e.loss, e.train_loss)
        for panel in figure.panels
        for run in panel.comparison.runs
        for e in run.history
    )
    return write_csv([dict(zip(_BY_ROUND, row, strict=True)) for row in values], _BY_ROUND)


def _drop_missing(value: Any) -> Any:
    """Leave out keys without a value, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {key: _drop_missing(item) for key, item in value.items() if item is not None}
    return [_drop_missing(item) for item in value] if isinstance(value, list | tuple) else value
