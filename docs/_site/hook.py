"""What `mkdocs build` adds to the pages of docs/: generated pages, links, diagrams.

Pages of docs/ are written for a code host: they link to files next to them. Here such a link leads
to a page of the site. A file outside docs/ that a page links to becomes a page that shows it.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import drawing
import generate

ROOT = Path(__file__).parents[2]
# Pages that live elsewhere, by their place in the site.
PLACES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "examples/flower_quickstart.md": "examples/flower_quickstart/README.md",
    "examples/flower_hospital.md": "examples/flower_hospital/README.md",
}
WIDE = {"fidelity.md"}  # pages whose tables have long cells
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^( *)(`{3,})[^`\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HTML_COMMENT = re.compile(r"^ *<!-- .*? -->\n", re.MULTILINE)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
METHOD = re.compile(r"^\| `(\w+)`", re.MULTILINE)  # the first cell of a row
ITEM = re.compile(r"(?:\d+\.|[-*]) +")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files, and those of linked files."""
    pages = {place: (ROOT / path).read_text(encoding="utf-8") for place, path in PLACES.items()}
    sections = generate.list_sections()
    for made in sections.values():
        pages |= {place: text for place, (_, text) in made.items()}
    pages |= generate.list_single_pages()
    config.extra["origins"] = origins = {
        **PLACES,
        **{place: f"docs/{place}" for place in pages if place not in PLACES},
    }
    for file in files.documentation_pages():
        origins[file.src_uri] = f"docs/{file.src_uri}"
        pages[file.src_uri] = (ROOT / "docs" / file.src_uri).read_text(encoding="utf-8")
    places = {origin: place for place, origin in origins.items()}
    places |= {f"docs/{place[:-3]}.ipynb": place for place in sections["notebooks"]}
    for place, text in list(pages.items()):
        for path in list_linked_files(text, origins[place]):
            if path not in places and not path.startswith("docs/"):
                places[path] = f"sources/{path.replace('/', '-')}.md"
                pages[places[path]] = generate.show_source(path)
                origins[places[path]] = path
    config.extra["places"] = places
    sections["sources"] = {
        place: (path, "") for path, place in places.items() if place.startswith("sources/")
    }
    for place in pages:
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=pages[place]))
    config.nav = [*expand(config.nav, sections)]
    headings = {place: found[1] for place in pages if (found := TITLE.search(pages[place]))}
    config.extra["titles"] = headings | dict(list_titles(config.nav))
    return files


def list_titles(nav: list) -> Iterator[tuple[str, str]]:
    """Yield the pages of the navigation and their titles there."""
    for entry in nav:
        for title, inner in entry.items() if isinstance(entry, dict) else ():
            if isinstance(inner, str):
                yield inner, title
            else:
                yield from list_titles(inner)


def expand(nav: list, sections: dict) -> list:
    """Return the navigation with the generated sections instead of their names."""
    found = []
    for entry in nav:
        if isinstance(entry, str) and entry.startswith("$"):
            made = sections[entry[1:]]
            found += [{title: place} for place, (title, _) in made.items()]
        elif isinstance(entry, dict):
            found.append(
                {k: expand(v, sections) if isinstance(v, list) else v for k, v in entry.items()}
            )
        else:
            found.append(entry)
    return found


def list_linked_files(text: str, origin: str) -> list[str]:
    """Return the files of the project that a page links to."""
    found = []
    for _, target, _, _ in LINK.findall(FENCE.sub("", text)):
        path = locate(target, origin)
        if path and (ROOT / path).is_file() and PurePosixPath(path).suffix != ".png":
            found.append(path)
    return found


def locate(target: str, origin: str) -> str | None:
    """Return the path of a link's target in the project, or none if it leads elsewhere."""
    if re.match(r"\w+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def indent_lists(text: str) -> str:
    """Indent what belongs to a list's item by four spaces, which this Markdown wants."""
    lines, width = [], 0
    for line in text.split("\n"):
        if item := ITEM.match(line):
            width = len(item[0])
        elif line and not line.startswith(" " * width):
            width = 0
        inside = width and line.startswith(" " * width) and width < len("    ")
        lines.append(" " * (len("    ") - width) + line if inside else line)
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and put in drawings."""
    del files
    origins, places = config.extra["origins"], config.extra["places"]
    titles = config.extra["titles"]
    place = page.file.src_uri
    kept: list[str] = []

    def lead(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        path = locate(target, origins[place])
        if path is None:
            return match[0]
        goal = places.get(path) or path.removeprefix("docs/")
        if path not in places and not path.startswith("docs/"):
            raise PluginError(f"{origins[place]} links to {target}, which is no page and no file.")
        relative = posixpath.relpath(goal, posixpath.dirname(place) or ".")
        text = titles.get(goal, "")
        if text and start.strip("[](") in {target, path, f"{target}{anchor or ''}"}:
            start = f"[{text}]("  # on a code host the name of the file, here the page's title
        return f"{start}{relative}{anchor or ''}{end}"

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    if place in WIDE:
        page.meta["hide"] = ["toc"]
        markdown = f'<div class="wide" markdown>\n\n{markdown}\n\n</div>'
    if not page.file.src_uri.startswith("sources/"):
        markdown = indent_lists(markdown)
    markdown = MERMAID.sub(lambda match: generate.show_diagram(match[1]), markdown)
    markdown = FENCE.sub(keep, HTML_COMMENT.sub("", markdown))
    if place == "methods.md":
        markdown = METHOD.sub(r"| [`\1`](methods/\1.md)", markdown)
    markdown = LINK.sub(lead, markdown)
    markdown = generate.inline_drawings(markdown)
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the style of drawings, which their files on a code host have in themselves."""
    style = Path(config.site_dir) / "assets" / "drawings.css"
    style.write_text(drawing.STYLE, encoding="utf-8")
