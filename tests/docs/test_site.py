"""The site of `make docs`: complete, without dead links, from disk, without other machines."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

import fednorm
from docs.pages import PAGES, ROOT
from fednorm.cli.listing import KINDS
from fednorm.experiment.schema.config import Experiment
from fednorm.strategies import STRATEGIES

pytestmark = pytest.mark.slow
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class References(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADS and values.get(LOADS[tag]) and values.get("rel") != "canonical":
            self.loads.append(values[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    found = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "WARNING" not in found.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Return what each page of the site refers to."""
    return {
        path: References(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"  # for servers: its links are absolute
    }


def test_no_link_is_dead(pages):
    dead = []
    for page, found in pages.items():
        for link in found.links:
            target, anchor = urldefrag(link)
            if re.match(r"\w+:", target):
                continue
            path = (page.parent / unquote(target)).resolve() if target else page
            known = pages.get(path)
            if not path.is_file() or (anchor and known and unquote(anchor) not in known.anchors):
                dead.append((page.name, link))
    assert len(pages) > 60
    assert dead == []


def test_nothing_comes_from_another_machine(site, pages):
    for page, found in pages.items():
        assert [url for url in found.loads if re.match(r"(?:https?:)?//", url)] == [], page
        assert all(
            (page.parent / urldefrag(url)[0]).exists() for url in found.loads if url[:5] != "data:"
        )
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", text), style.name
    # Material's script asks for Mermaid where a page has a diagram that is not drawn.
    assert not any('class="mermaid"' in page.read_text(encoding="utf-8") for page in pages)


def test_it_opens_from_disk_and_is_searchable(site, pages):
    assert not any(
        link.endswith("/") for found in pages.values() for link in found.links if ":" not in link
    )
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("var __index = "))["docs"]
    places = {entry["location"].partition("#")[0] for entry in index}
    assert {"methods/fbn.html", "api/run-and-compare.html", "privacy.html"} <= places
    assert (site / "assets" / "iframe-worker.js").is_file()  # search in a page from disk


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_has_a_page(site, name):
    assert f'href="methods/{name}.html"><code>' in (site / "methods.html").read_text()
    page = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
    for heading in ("What it does", "Fidelity"):
        assert f">{heading}<" in page
    assert "use it" in page
    assert page.count("<svg viewBox") >= 3  # the panels of its figure
    assert "method_figures.py" in page


def test_every_public_name_is_in_the_api(pages):
    anchors = {
        anchor
        for page, found in pages.items()
        if page.parent.name == "api"
        for anchor in found.anchors
    }
    names = {
        name: getattr(fednorm, name).__module__ if name == "FednormError" else "fednorm"
        for name in fednorm.__all__
    }
    assert [name for name, place in names.items() if f"{place}.{name}" not in anchors] == []


def test_doctests_of_the_api_are_shown_as_code(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<blockquote>" not in text, page.name  # `>>>` outside of code is a quotation


def test_every_setting_and_entry_is_in_the_reference(site):
    settings = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    assert [key for key in Experiment.model_fields if f"<code>{key}</code>" not in settings] == []
    entries = (site / "reference" / "entries.html").read_text(encoding="utf-8")
    names = {name for kind, known in KINDS.items() if kind != "strategies" for name in known}
    assert [name for name in names if not re.search(rf"<code>{name}(?:=|<)", entries)] == []


def test_the_gallery_has_every_figure_of_the_results(site):
    gallery = (site / "gallery.html").read_text(encoding="utf-8")
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    images = re.findall(r"!\[[^\]]*\]\(([\w-]+\.png)\)", results)
    assert len(images) >= 4
    assert [image for image in images if image not in gallery] == []


def test_every_page_of_docs_is_in_the_navigation():
    """A new page needs one line in `nav` of mkdocs.yml."""
    listed = set(
        re.findall(r"^ *- (?:.+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    assert {page.name for page in PAGES if page.parent == ROOT / "docs"} <= listed


def test_drawings_are_small():
    files = [
        path for path in Path(ROOT / "docs").rglob("*") if path.suffix in {".svg", ".png", ".ipynb"}
    ]
    assert sum(path.stat().st_size for path in files if "figures" in path.parts) < 1_000_000
    assert all(path.stat().st_size < 150_000 for path in files)
