"""Pages link to what exists, use the words of CONTRIBUTING.md, and show what is printed."""

import re
import subprocess
import tokenize
import tomllib
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import pytest

from docs.pages import PAGES, ROOT, list_blocks, list_spans, name_of, read_prose
from docs.regenerate import DOCTOR, EXAMPLE, render_example
from fednorm import names
from fednorm.cli.listing import read_docstring
from fednorm.doctor.findings import Statistics
from fednorm.strategies import STRATEGIES

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`[\w/]*\.py(?:::\w+)?`|`::\w+`")  # a cited test: names as they are
PATH = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|toml|md|png)|(?:[\w-]+/)+")
# Names that are not files of this project, or of the reader's own.
ELSEWHERE = {
    "base.py", "config.toml", "methods.py", "pyproject.toml", "strategies/mine.py", "curves.png",
    "tests/strategies/test_mine.py", "photos/", "results/", "runs/", "site/",
}  # fmt: skip
WORDS = re.search(
    r"<!-- words -->\n(.*?)<!-- /words -->",
    (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
    re.DOTALL,
)[1]


def read_banned():
    """Return the words that the table of CONTRIBUTING.md bans."""
    rows = [row.split("|")[1] for row in WORDS.splitlines()[2:]]
    return [word.strip() for row in rows for word in row.split(",")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in LINK.findall(read_prose(page)):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_the_text_exist(page):
    roots = (ROOT, ROOT / "src" / "fednorm", ROOT / "tests", page.parent)
    spans = {span for span in list_spans(page) if PATH.fullmatch(span)} - ELSEWHERE
    missing = {s for s in spans if not any((root / s).exists() for root in roots)}
    assert missing == set()


def test_pages_link_each_other():
    pages = [page for page in PAGES if page.parent == ROOT / "docs"]
    assert len(pages) > 20
    for page in pages:
        others = {t for t in LINK.findall(read_prose(page)) if t.partition("#")[0].endswith(".md")}
        assert others, f"{page.name} links to no other page"


def test_readme_is_short_and_leads_to_the_rest():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    linked = set(LINK.findall(text))
    assert {
        f"docs/{name}.md" for name in ("start", "why", "concepts", "methods", "choose")
    } <= linked
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"} <= linked


def test_readme_names_every_strategy_once():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| family \|.*\n((?:\|.*\n)+)", text)
    rows = [row.split("|")[2] for row in table.splitlines()[1:]]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(
        STRATEGIES
    )


def test_no_page_installs_a_name_that_is_on_no_index():
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert not re.search(r"pip install \"?fednorm", page.read_text(encoding="utf-8")), page


def test_the_demo_installs_no_tools_and_shows_progress():
    called = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],  # noqa: S607 (make is where the user has it)
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (install,) = [line for line in called.splitlines() if "pip install" in line]
    assert install.endswith("--editable '.'")
    assert "--quiet" not in install


def test_the_citation_has_the_paper_of_every_strategy():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for name in STRATEGIES:
        for found in re.findall(
            r"arXiv:(\d{4}\.\d{4,5})", read_docstring(*STRATEGIES.locate(name))[1]
        ):
            assert found in cited, (name, found)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}" in cited
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_table_of_words_is_read():
    assert {"somebody", "so many", "lockstep", "liars"} <= set(read_banned())


TEXTS = {"COMMENT", "STRING", "FSTRING_MIDDLE"}  # the last since Python 3.12
BANNED = re.compile(rf"\b(?:{'|'.join(map(re.escape, read_banned()))})\b", re.IGNORECASE)


def find_banned(text):
    """Return where a text has a banned word, with the words around it."""
    text = " ".join(text.split())
    return [text[max(0, m.start() - 40) : m.end() + 20] for m in BANNED.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_words_are_those_of_an_engineer(page):
    text = read_prose(page).replace(WORDS, "")
    if page.name == "CHANGELOG.md":  # its table says what the old words were
        text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    assert find_banned(TEST.sub("", text)) == []


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples"])
def test_the_words_of_comments_and_texts_in_code_are_the_same(folder):
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        # Few files have such a word at all, and `names.py` has the old names of keys.
        if path.name != "names.py" and find_banned(path.read_text(encoding="utf-8")):
            with path.open("rb") as file:
                tokens = list(tokenize.tokenize(file.readline))
            told = [t.string for t in tokens if tokenize.tok_name[t.type] in TEXTS]
            found[name_of(path)] = [words for text in told for words in find_banned(text)]
    assert {name: words for name, words in found.items() if words} == {}


def test_the_changelog_names_every_renamed_name():
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for old, new in names.RENAMED.items():
        assert re.search(rf"^\|.*\| `{old}`.* \| `{new}`.* \|$", page, re.MULTILINE), old


def test_concepts_defines_each_word_once():
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| [A-Z][^|]* \| [^|]* \|$", page, re.MULTILINE)
    assert len(rows) > 35
    assert len(set(rows)) == len(rows)
    (diagram,) = [b for b in list_blocks("mermaid") if b.page == "docs/concepts.md"]
    assert diagram.text.startswith("sequenceDiagram\n")
    blocks = re.findall(r"^ *(rect|opt|loop|end)\b", diagram.text, re.MULTILINE)
    assert blocks.count("end") * 2 == len(blocks)  # mermaid shows nothing otherwise


@pytest.mark.slow
def test_the_example_of_the_doctor_is_what_it_prints():
    shown = EXAMPLE.search(DOCTOR.read_text(encoding="utf-8"))[2].split()
    for there, here in zip_longest(shown, render_example().split()):
        if "e-" in there:  # rounding errors: another machine has others
            assert "e-" in here
        elif re.fullmatch(r"\d+\.\d+", there):
            assert float(here) == pytest.approx(float(there), rel=0.02)
        else:
            assert here == there


def test_the_doctors_statistics_are_explained():
    prose = read_prose(Path(DOCTOR))
    assert [word for word in get_args(Statistics) if f"`{word}`" not in prose] == []
