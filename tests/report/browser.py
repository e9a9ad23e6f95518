"""Runs a page, unchanged, in a frame of a headless Chromium, and asks a script what it sees."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

_IFRAME = '<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>'
# The script stands outside of the page, whose own policy would not let it in.
_FRAMES = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
{frames}
<pre id="outcome"></pre>
<script>
const read = (page) => {{
  const view = page.defaultView;
  const all = (selector, root = page) => [...root.querySelectorAll(selector)];
  const texts = (selector, root = page) => all(selector, root).map((e) => e.textContent);
  {script}
}};
onload = () => {{
  const pages = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument);
  let outcome;
  try {{ outcome = {{ values: pages.map(read) }}; }} catch (error) {{ outcome = error.stack; }}
  document.getElementById("outcome").textContent = JSON.stringify(outcome);
}};
</script>"""


@dataclass(frozen=True)
class Seen:
    value: object  # what the script returned
    console: list[str]


def browse(html, script, folder):
    """Open the page and return what the script, which may use `page`, `all`, `texts`, returns."""
    seen = browse_all([(html, 1100)], script, folder)
    return Seen(seen.value[0], seen.console)


def browse_all(pages, script, folder):
    """Open several pages, each with a width, and return a list of what the script returns."""
    frames = "\n".join(_IFRAME.format(width=width, page=escape(html)) for html, width in pages)
    frame = folder / "frames.html"
    frame.write_text(_FRAMES.format(frames=frames, script=script), encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",  # tests may run as root in a container
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1100,900",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (found,) = re.findall(r'<pre id="outcome">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    outcome = json.loads(unescape(found))
    assert isinstance(outcome, dict), outcome
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(outcome["values"], console)
