"""The sections of the page, in the order in which they stand."""

from collections.abc import Iterator, Sequence
from html import escape

from fednorm.experiment.result import RunResult
from fednorm.experiment.story import Panel, Story
from fednorm.report import elements as html
from fednorm.report.agreement import RULE, agreement
from fednorm.report.compared import compared, compared_exchanges
from fednorm.report.diagnostics import diagnosed, diagnostics, explanation
from fednorm.report.figure import NARROW, WIDE
from fednorm.report.heat import heat_verdict
from fednorm.report.numbers import percent, sentence_case
from fednorm.report.panels import Plots
from fednorm.report.plots import finals_svg, grid_svg, heat_svg, panel_svg
from fednorm.report.setting import divide, flatten, setting
from fednorm.report.tables import caption, cells, columns
from fednorm.report.verdict import caveats, verdict

_HINT = "Point at the curves, or focus them and use the arrow keys, for values. "


def introduction(story: Story) -> Iterator[str]:
    """Ask the question and answer it, panel by panel, with what the answer must be read with."""
    yield html.paragraph("title", story.title)
    yield html.heading(1, story.question)
    if len(settings := _settings(story)) == 1:
        yield html.paragraph("setting", settings[0])
    if story.source:
        yield html.paragraph("setting", f"Published in: {story.source}")
    if sentence := heat_verdict(story):
        yield html.paragraph("verdict", sentence)
    else:
        yield from (_verdict(panel) for panel in story.panels)
    for sentence in _once(story, [caveats(panel.comparison) for panel in story.panels]):
        yield html.paragraph("caveats", sentence)


def _verdict(panel: Panel) -> str:
    title = f"<b>{escape(panel.title)}</b> " if panel.title else ""
    found = agreement(panel)
    order = f" <em>{escape(found.statement())}</em>" if found else ""
    # A number stays on one line with its spread and sign.
    text = verdict(panel.comparison).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    return f'<p class="verdict">{title}{escape(text)}{order}</p>'


def cuts(story: Story) -> Iterator[str]:
    """Say how the setting differs from the published one."""
    if story.cuts:
        yield html.heading(2, "What was cut")
        yield html.listing([escape(cut) for cut in story.cuts], "cuts")


def _once(story: Story, sentences: Sequence[Sequence[str]]) -> Iterator[str]:
    """Join the sentences of the panels, each once, with the panels that it is true of."""
    for sentence in dict.fromkeys(s for some in sentences for s in some):
        of = [p.title for p, some in zip(story.panels, sentences, strict=True) if sentence in some]
        everywhere = len(of) == len(story.panels)
        yield sentence if everywhere else f"{', '.join(of)}: {sentence}"


def finals(story: Story, drawn: Plots) -> Iterator[str]:
    """Show final values against what the panels differ in."""
    if drawn.finals:
        yield html.heading(2, f"Final {drawn.finals.metric} by {drawn.finals.axis}")
        yield html.legend(drawn.looks, drawn.finals.lines, {})
        wide = f'<div class="wide">{finals_svg(drawn, WIDE)}</div>'
        narrow = f'<div class="narrow">{finals_svg(drawn, NARROW)}</div>'
        yield f'<div class="plots alone"><figure class="finals">{wide}{narrow}</figure></div>'
        hollow = " Hollow markers are published numbers." if drawn.finals.published else ""
        yield html.paragraph("caption", f"{_metrics(story)} at the last evaluation.{hollow}")


def heat(story: Story) -> Iterator[str]:
    """Show by how many points one method is ahead of another, panel by panel."""
    if story.heat and (drawn := heat_svg(story)):
        ahead, behind = story.heat
        yield html.heading(2, f"{ahead} against {behind}")
        yield f'<figure class="finals">{drawn}</figure>'
        yield html.paragraph(
            "caption", f"Points by which {ahead} ends above {behind}; green where it ends below."
        )


def grid(story: Story) -> Iterator[str]:
    """Show final values of a comparison that was swept over attacks and defences."""
    if drawn := grid_svg(story):
        yield html.heading(2, "Attacks and defences")
        yield f'<figure class="finals">{drawn}</figure>'
        yield html.paragraph(
            "caption", f"Final {_metrics(story).lower()} in %: attacks down, defences across."
        )


def curves(story: Story, drawn: Plots) -> Iterator[str]:
    """Show the curves of every panel under one legend."""
    if not drawn.panels and (drawn.finals or story.heat):
        return
    yield html.heading(2, f"{_metrics(story)} by round")
    marks = {
        "diverged": "×" if any(plot.ends for plot in drawn.panels) else "",
        "published": "- -" if any(plot.published for plot in drawn.panels) else "",
    }
    yield html.legend(drawn.looks, drawn.drawn, {k: v for k, v in marks.items() if v})
    alone = len(drawn.panels) == 1
    yield f'<div class="plots{" alone" if alone else ""}">'
    for number, (panel, plot) in enumerate(zip(story.curve_panels, drawn.panels, strict=True)):
        wide = f'<div class="wide">{panel_svg(drawn, plot, WIDE)}</div>' if alone else ""
        narrow = f'<div class="narrow">{panel_svg(drawn, plot, NARROW)}</div>'
        yield f"<figure>{html.heading(3, panel.title)}"
        if len(_settings(story)) > 1:
            yield html.paragraph("setting", setting(panel.comparison.config))
        yield f'<div class="plot" data-panel="{number}">{wide}{narrow}</div></figure>'
    yield "</div>"
    many = any(len({run.seed for run in p.comparison.runs}) > 1 for p in story.panels)
    band = " Lines are means over seeds; bands reach from the lowest to the highest seed."
    dashes = " Dashes at the right are published numbers." if marks["published"] else ""
    text = f"{_metrics(story)} on test data.{band if many else ''}{dashes}"
    yield f'<p class="caption"><span class="hint">{_HINT}</span>{text}</p>'


def _settings(story: Story) -> list[str]:
    return list(dict.fromkeys(setting(panel.comparison.config) for panel in story.panels))


def _metrics(story: Story) -> str:
    names = dict.fromkeys(panel.comparison.metric for panel in story.panels)
    return sentence_case(" and ".join(names) or "accuracy")


def published(story: Story, drawn: Plots) -> Iterator[str]:
    """Put published and measured numbers side by side."""
    if not any(panel.published for panel in story.panels):
        return
    yield html.heading(2, f"{_metrics(story)}, published and measured")
    yield '<div class="pairs">'
    for panel in story.panels:
        if found := agreement(panel):
            rows = compared(found, best=panel.best)
            yield f"<section>{html.heading(3, panel.title)}"
            yield f"{html.table(list(rows[0]), rows, drawn.looks)}</section>"
    yield "</div>"
    yield html.paragraph("caption", f"Gap: measured minus published, in points. {RULE}")


def exchanges(story: Story, drawn: Plots) -> Iterator[str]:
    """Put published and measured numbers of exchanges side by side."""
    for panel in story.panels:
        if rows := compared_exchanges(panel):
            yield html.heading(2, "Exchanges a round, published and measured")
            yield html.heading(3, panel.title)
            yield html.table(list(rows[0]), rows, drawn.looks)


def results(story: Story, drawn: Plots) -> Iterator[str]:
    """Show the table of every panel."""
    yield html.heading(2, "Results")
    for panel in story.panels:
        yield html.heading(3, panel.title)
        yield html.table(columns(panel.comparison), cells(panel.comparison), drawn.looks)
    for sentences in _once(story, [[caption(panel.comparison)] for panel in story.panels]):
        yield html.paragraph("caption", sentences)


def diagnosis(story: Story, drawn: Plots) -> Iterator[str]:
    """Show what was recorded of statistics and gradients."""
    recorded = [panel for panel in story.panels if diagnosed(panel.comparison)]
    if recorded:
        yield html.heading(2, "Diagnostics")
    for number, panel in enumerate(recorded):
        yield html.heading(3, panel.title)
        yield html.legend(drawn.looks, diagnosed(panel.comparison), {})
        plots = diagnostics(panel.comparison, drawn.looks, str(number))
        figures = (
            f"<figure>{html.heading(4, title)}{svg}</figure>" for title, svg in plots.items()
        )
        yield f'<div class="plots small">{"".join(figures)}</div>'
        yield html.paragraph("caption", explanation(panel.comparison))


def failures(story: Story) -> Iterator[str]:
    """List the runs that did not finish, with the whole message."""
    failed = [
        _failure(run, panel.title)
        for panel in story.panels
        for run in panel.comparison.runs
        if run.status != "finished"
    ]
    if failed:
        yield html.heading(2, "Failures")
        yield html.listing(failed, "failures")


def _failure(run: RunResult, where: str) -> str:
    rounds = f"{run.rounds} round{'' if run.rounds == 1 else 's'}"
    place = f"{escape(where)}, " if where else ""
    head = f"<strong>{escape(run.strategy)}</strong>, {place}seed {run.seed}: {run.status}"
    message = f"<pre>{escape(run.error)}</pre>" if run.error else ""
    return f"{head} after {rounds}{message}"


def clients(story: Story) -> Iterator[str]:
    """List what each client reaches, where that was measured."""
    listed = {
        ", ".join(filter(None, (panel.title, run.strategy, f"seed {run.seed}"))): " · ".join(
            percent(value) for value in run.final.per_client
        )
        for panel in story.panels
        for run in panel.comparison.runs
        if run.final and run.final.per_client
    }
    if listed:
        yield html.heading(2, f"{_metrics(story)} of each client")
        yield html.definitions(listed)
        told = [
            [f"In %, each client on {panel.comparison.tested_on}, at the last evaluation."]
            for panel in story.panels
        ]
        for sentence in _once(story, told):
            yield html.paragraph("caption", sentence)


def what_was_run(story: Story) -> Iterator[str]:
    """Give command, config, seeds and versions; what panels share stands there once."""
    yield html.heading(2, "What was run")
    yield "<p>To repeat it:</p>"
    yield f"<pre><code>{escape(story.command)}</code></pre>"
    shared, own = divide([flatten(panel.comparison.config) for panel in story.panels])
    yield html.heading(3, "Config")
    yield html.definitions(shared)
    for panel, values in zip(story.panels, own, strict=True):
        if values:
            yield html.heading(4, panel.title)
            yield html.definitions(values)
    runs = [run for panel in story.panels for run in panel.comparison.runs]
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    versions, _ = divide([panel.comparison.environment for panel in story.panels])
    yield html.heading(3, "Seeds and versions")
    yield html.definitions({"seeds": seeds or "none", **versions})
