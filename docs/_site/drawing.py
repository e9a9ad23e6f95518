"""Drawings as SVG that stand alone on a code host, and take the page's colours on the site.

A drawing is a row of panels. The site puts each panel into the page by itself, so that they stack
where the page is narrow.
"""

import re

STYLE = """
.fn { --ink: var(--md-default-fg-color, #222); --pale: var(--md-default-fg-color--light, #666);
  --grid: var(--md-default-fg-color--lightest, #ddd); --one: #c2410c; --two: #1d4ed8;
  --three: #64748b; }
[data-md-color-scheme="slate"] .fn { --one: #fb923c; --two: #60a5fa; --three: #94a3b8; }
.fn text { fill: var(--ink); font: 10px sans-serif; }
.fn .title { font-weight: 600; }
.fn .tick { font-size: 9px; fill: var(--pale); }
.fn .grid { stroke: var(--grid); fill: none; }
.fn polyline, .fn path { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.fn .method { stroke: var(--one); stroke-width: 2.2; }
.fn .centralized { stroke: var(--two); stroke-dasharray: 5 3; }
.fn .naive { stroke: var(--three); }
.fn .first { stroke: var(--one); fill: var(--one); fill-opacity: 0.18; }
.fn .second { stroke: var(--two); fill: var(--two); fill-opacity: 0.18; }
"""
ALONE = """
@media (prefers-color-scheme: dark) { .fn { --ink: #ddd; --pale: #999; --grid: #444;
  --one: #fb923c; --two: #60a5fa; --three: #94a3b8; } }
"""
PANEL = re.compile(
    r'<svg class="panel" x="[\d.]+" y="[\d.]+" width="[\d.]+" height="[\d.]+" (.*?</svg>)',
    re.DOTALL,
)


def join_panels(panels: list[str], width: float, height: float, label: str) -> str:
    """Return a drawing of panels of one size next to each other."""
    inner = "".join(
        f'<svg class="panel" x="{place * width:g}" y="0" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n{panel}\n</svg>\n'
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg class="fn" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {width * len(panels):g} {height:g}">\n<style>{STYLE}{ALONE}</style>\n'
        f"{inner}</svg>\n"
    )


def split_panels(drawing: str) -> str:
    """Return a drawing for a page of the site: its panels, which the page arranges."""
    (label,) = re.findall(r'aria-label="([^"]*)"', drawing)
    panels = "".join(f"<svg {panel}" for panel in PANEL.findall(drawing))
    return f'<div class="figure panels fn" role="img" aria-label="{label}">{panels}</div>'
