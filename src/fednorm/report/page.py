"""A story as one HTML file: no request, light and dark, phone and paper, with or without script."""

import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from importlib.resources import files

from fednorm.experiment.story import Story
from fednorm.report import sections
from fednorm.report.panels import Plots, plots
from fednorm.report.setting import setting


def page(story: Story) -> str:
    """Return the page; all that comes from labels, config and errors is escaped."""
    drawn = plots(story)
    body = "\n".join(section for section in _sections(story, drawn) if section)
    title = " – ".join(filter(None, (story.question, story.title or _setting(story))))
    script = _file("page.js")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="story">{_embedded(drawn)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _sections(story: Story, drawn: Plots) -> Iterator[str]:
    yield from sections.introduction(story)
    yield from sections.cuts(story)
    yield from sections.finals(story, drawn)
    yield from sections.heat(story)
    yield from sections.grid(story)
    yield from sections.curves(story, drawn)
    yield from sections.published(story, drawn)
    yield from sections.exchanges(story, drawn)
    yield from sections.results(story, drawn)
    yield from sections.diagnosis(story, drawn)
    yield from sections.failures(story)
    yield from sections.clients(story)
    yield from sections.what_was_run(story)


def _setting(story: Story) -> str:
    return setting(story.panels[0].comparison.config) if story.panels else ""


def _file(name: str) -> str:
    return files("fednorm.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Forbid every request, and every script but this one.

    Styles may be inline, since matplotlib writes them so; without requests they can do no harm.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(drawn: Plots) -> str:
    """Return JSON that cannot end its script element, whatever the labels are."""
    text = json.dumps(drawn.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
