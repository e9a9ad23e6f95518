"""Draw what the pages show: Mermaid diagrams as SVG, and the figure of docs/why.md.

    npm install --prefix /tmp/mermaid mermaid
    python docs/_site/draw_diagrams.py /tmp/mermaid/node_modules/mermaid/dist/mermaid.min.js

Needs Chromium for the diagrams. Pages with diagrams stay readable on a code host, which draws
Mermaid itself; the site shows these files, so that it needs no script of three megabytes. A file is
named after the text of its diagram: one that has changed is missed when the site is built.
"""

import hashlib
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from drawing import join_panels

DOCS = Path(__file__).parents[1]
FIGURES = DOCS / "figures"
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Colours of the drawing, and the page's that replace them.
INK, PAPER, LINE, TINT = "#010203", "#fdfcfb", "#818283", "#e1e2e3"
PALETTE = {
    INK: "var(--md-default-fg-color)",
    PAPER: "var(--md-default-bg-color)",
    LINE: "var(--md-default-fg-color--light)",
    TINT: "var(--md-code-bg-color)",
}
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="{script}"></script><script>
mermaid.initialize({{startOnLoad: false, theme: "base", fontFamily: "sans-serif", themeVariables: {{
  background: "{paper}", mainBkg: "{tint}", primaryColor: "{tint}", primaryTextColor: "{ink}",
  primaryBorderColor: "{line}", lineColor: "{line}", textColor: "{ink}", actorBkg: "{tint}",
  actorBorder: "{line}", actorTextColor: "{ink}", actorLineColor: "{line}", signalColor: "{line}",
  signalTextColor: "{ink}", labelBoxBkgColor: "{tint}", labelBoxBorderColor: "{line}",
  labelTextColor: "{ink}", loopTextColor: "{ink}", noteBkgColor: "{tint}",
  noteBorderColor: "{line}", noteTextColor: "{ink}"}}}});
mermaid.render("{name}", {text!r}).then(({{svg}}) => {{
  document.body.innerHTML = svg; document.title = "drawn"; }});
</script>"""


def draw_mermaid(text: str, script: Path) -> str:
    """Return a Mermaid diagram as SVG whose colours are the page's."""
    name = "diagram-" + hashlib.sha256(text.encode()).hexdigest()[:8]
    colors = {"ink": INK, "paper": PAPER, "line": LINE, "tint": TINT}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(
            PAGE.format(script=script.resolve().as_uri(), name=name, text=text, **colors),
            encoding="utf-8",
        )
        browser = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
        flags += ["--disable-background-networking", f"--user-data-dir={folder}/user", "--dump-dom"]
        found = subprocess.run(
            [browser, *flags, page.as_uri()], capture_output=True, text=True, check=True
        ).stdout
    svg = found[found.index("<svg") : found.rindex("</svg>") + len("</svg>")]
    for color, variable in PALETTE.items():
        svg = re.sub(re.escape(color), variable, svg, flags=re.IGNORECASE)
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        svg = re.sub(rf"rgb\({red}, ?{green}, ?{blue}\)", variable, svg)
    return svg


def draw_bell(center: float, spread: float, css: str, scale: float) -> str:
    """Return the density of a normal distribution as an outline."""
    points = []
    for step in range(-90, 91):
        x = step / 20
        y = math.exp(-(((x - center) / spread) ** 2) / 2) / spread
        points.append(f"{120 + 23 * x:.1f},{150 - scale * y:.1f}")
    return f'<polyline class="{css}" points="{" ".join(points)}"/>'


def draw_why() -> str:
    """Return the figure of docs/why.md: two clients under three normalizations."""
    means, spreads = (-1.9, 1.6), (0.75, 1.1)
    center = sum(means) / 2
    total = math.sqrt(sum(s * s for s in spreads) / 2 + sum((m - center) ** 2 for m in means) / 2)
    panels = [
        ("What the clients have", "client 1 and client 2 differ", means, spreads),
        ("Each by its own statistics", "the difference is gone", (0.0, 0.0), (1.0, 1.0)),
        (
            "All by shared statistics", "the difference is kept",
            [(m - center) / total for m in means], [s / total for s in spreads],
        ),
    ]  # fmt: skip
    drawn = []
    for title, note, centers, widths in panels:
        scale = 105 * min(widths)  # the highest bell is as high in every panel
        scale = min(scale, 80)
        bells = zip(centers, widths, ("first", "second"), strict=True)
        drawn.append("\n".join([
            f'<text class="title" x="120" y="18" text-anchor="middle">{title}</text>',
            '<path class="grid" d="M10 150h220M120 32v122"/>',
            *(draw_bell(*bell, scale) for bell in bells),
            '<text class="tick" x="120" y="166" text-anchor="middle">0</text>',
            f'<text x="120" y="184" text-anchor="middle">{note}</text>',
        ]))  # fmt: skip
    label = "Two clients, each normalised with its statistics and with shared ones"
    return join_panels(drawn, 240, 192, label)


def main() -> None:
    """Draw everything."""
    (FIGURES / "why.svg").write_text(draw_why(), encoding="utf-8")
    if len(sys.argv) == 1:
        return
    folder = FIGURES / "diagrams"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for page in sorted(DOCS.glob("*.md")):
        for text in MERMAID.findall(page.read_text(encoding="utf-8")):
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            drawing = draw_mermaid(text, Path(sys.argv[1]))
            (folder / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
