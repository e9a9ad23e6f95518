"""Pages that are made when the site is built: methods, settings, entries, notebooks, API, gallery.

Nothing here imports torch: docstrings and fields are read from the source.
"""

import hashlib
import json
import re
from pathlib import Path

from drawing import split_panels

from fednorm.cli.listing import KINDS, find_argument, read_docstring, read_fields
from fednorm.experiment.schema.config import Experiment
from fednorm.report.format import format_toml
from fednorm.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CAPTION = """\
Accuracy in % on held-out 8×8 digits by round, mean over 3 seeds; ten clients with one digit each.
For strategies that keep layers on the client it is the mean over clients, each on its test split,
which has that client's digit. The settings are `choose-one-step-bn-last` (with half its rounds),
`choose-one-step-bn-first` and `choose-local-one-class` of `configs/`
([which method?](../choose.md)); `python benchmarks/method_figures.py` makes the figure."""
ARXIV = re.compile(r"(?<!/)arXiv:(\d{4}\.\d{4,5})")
DRAWING = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*(?:docs/)?(figures/[\w/-]+\.svg)\)")
PAGES = dict[str, tuple[str, str]]  # title and text, by place
NOTEBOOKS = ("why_batchnorm_breaks", "add_a_strategy", "your_model")

# The names of the API, by page; a test asks that none is missing.
API = {
    "Run and compare": ["compare", "simulate", "load", "Comparison", "RunResult", "Evaluation"],
    "Convert, fold, calibrate": ["convert", "fold", "calibrate"],
    "Your loop": [
        "Task", "broadcast", "client_round", "server_round", "export", "Batches", "Broadcast",
        "ClientState", "ServerState", "Reply", "Claim", "Moments", "pool", "Privacy",
    ],
    "Entries by name": [
        "create_strategy", "list_strategies", "create_algorithm", "list_algorithms",
        "create_aggregator", "list_aggregators", "create_attack", "list_attacks", "create_model",
        "list_models", "create_partition", "list_partitions", "partition", "load_dataset",
        "list_datasets",
    ],
    "Callbacks": ["Callback", "create_callback", "list_callbacks"],
    "Flower": ["flower"],
    "Doctor": ["doctor"],
    "Errors": ["errors"],
}  # fmt: skip
MODULES = {"flower", "doctor", "errors"}


def list_sections() -> dict[str, PAGES]:
    """Return the pages of each generated part of the navigation."""
    return {
        "methods": {
            f"methods/{name}.md": (name, describe_method(name))
            for name in ["naive", *sorted(set(STRATEGIES) - {"naive"})]
        },
        "notebooks": {
            f"notebooks/{path.stem}.md": (read_title(path), convert_notebook(path))
            for path in (DOCS / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS)
        },
        "api": {
            f"api/{re.sub('[^a-z]+', '-', title.lower())}.md": (title, document_names(title))
            for title in API
        },
    }


def list_single_pages() -> dict[str, str]:
    """Return the generated pages that the navigation names, by place."""
    return {
        "gallery.md": make_gallery(),
        "reference/settings.md": describe_settings(),
        "reference/entries.md": describe_entries(),
    }


def escape(text: str) -> str:
    """Return text for a cell of a table."""
    text = re.sub(r"(?<!`)\{[^`]*\}$", r"`\g<0>`", text)  # not a list of attributes
    return text.replace("|", "\\|").replace("\n", " ")


def read_row(page: str, name: str) -> tuple[list[str], list[str]] | None:
    """Return the head and the row of a name, in the table of a page whose first cell has it."""
    head: list[str] = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not head:
            head = cells
        elif f"`{name}`" in cells[0].split(" (")[0].split():
            return head, cells
    return None


def link_papers(text: str) -> str:
    """Return text whose arXiv numbers are links."""
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def format_docstring(text: str) -> str:
    """Return a docstring as Markdown: paths and names stay as they are."""
    text = re.sub(r"(?<![`\w])\*(?!\*)", r"\\*", text)
    text = re.sub(r"^(Client|Server|Test|Deviations?):", r"**\1:**", text, flags=re.MULTILINE)
    return link_papers(re.sub(r"`(docs/([\w-]+\.md))`", r"[\1](../\2)", text))


def describe_method(name: str) -> str:
    """Return the page of a strategy."""
    place = STRATEGIES.locate(name)
    summary, text = read_docstring(*place)
    parts = [f"# {name}", f"**{summary}**"]
    if found := read_row("methods.md", name):
        pairs = zip(found[0][1:], found[1][1:], strict=True)
        rows = [f"| {title} | {cell} |" for title, cell in pairs]
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    figure = DOCS / "figures" / "methods" / f"{name}.svg"
    if figure.is_file():
        parts.append(f"![{name} next to centralized and naive](../figures/methods/{name}.svg)")
        parts.append(CAPTION)
    parts += ["## What it does", format_docstring(text)]
    fields = read_fields(*place)
    if fields:
        parts += ["## Parameters", tabulate_fields(fields)]
    if found := read_row("fidelity.md", name):
        parts.append("## Fidelity")
        for title, cell in zip(found[0][1:], found[1][1:], strict=True):
            text = re.sub(r"\]\((?!\w+:)", "](../", cell.replace("\\|", "|"))
            parts.append(f"**{title[0].upper()}{title[1:]}**")
            parts.append(text.replace("<br>", "  \n"))
        parts.append("[Fidelity](../fidelity.md) defines the words of this section.")
    return "\n\n".join(parts) + "\n"


def tabulate_fields(fields: list) -> str:
    """Return the table of an entry's parameters."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for field in fields:
        default = "needed" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{field.name}` | {default} | {escape(field.help)} |")
    return wrap_table("\n".join(rows))


def wrap_table(table: str) -> str:
    """Return a table whose last column is below the others on a narrow screen."""
    return f'<div class="parameters" markdown>\n\n{table}\n\n</div>'


def describe_settings() -> str:
    """Return the page of all keys of an experiment."""
    rows = [
        f"| `{key}` | `{format_toml(field.default) or '–'}` | {escape(str(field.description))} |"
        for key, field in Experiment.model_fields.items()
    ]
    head = """\
# Settings of an experiment

Keys of a TOML file, of `--set`, and arguments of `fednorm.compare`; `fednorm list keys` prints the
same. [Experiments](../experiments.md) shows how they are used.

"""
    table = ["| key | default | meaning |", "|---|---|---|", *rows]
    return head + wrap_table("\n".join(table)) + "\n"


def describe_entries() -> str:
    """Return the page of everything that has a name, but for strategies."""
    parts = [
        "# Algorithms, attacks, data and the rest",
        "What `fednorm list` shows, with all parameters; [methods](../methods.md) have pages.",
    ]
    for kind, registry in KINDS.items():
        if kind == "strategies":
            continue
        parts.append(f"## {kind[0].upper()}{kind[1:]}")
        for name in registry:
            place = registry.locate(name)
            written = name
            if kind == "partitions" and (argument := find_argument(name)):
                written = f"{name}=<{argument}>"
            summary, text = read_docstring(*place)
            parts += [f"### `{written}`", summary]
            if text:
                parts.append(format_docstring(text))
            if fields := read_fields(*place):
                parts.append(tabulate_fields(fields))
    return "\n\n".join(parts) + "\n"


def document_names(title: str) -> str:
    """Return a page of the API."""
    parts = [f"# {title}"]
    for name in API[title]:
        options = ["    options:", "      show_root_toc_entry: true"]
        if name in MODULES:
            options.append("      heading_level: 1")
            parts = []
        parts.append("\n".join([f"::: fednorm.{name}", *options]))
    return "\n\n".join(parts) + "\n"


def show_source(path: str) -> str:
    """Return the page that shows a file of the project."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def show_diagram(text: str) -> str:
    """Return the drawing of a Mermaid diagram, which `draw_diagrams.py` made."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = DOCS / "figures" / "diagrams" / f"{name}.svg"
    if not path.is_file():
        raise FileNotFoundError(
            f"a diagram has changed, and {path.relative_to(ROOT)} is missing; "
            "run `python docs/_site/draw_diagrams.py`."
        )
    return f'<div class="figure diagram">{path.read_text(encoding="utf-8").strip()}</div>'


def inline_drawings(markdown: str) -> str:
    """Put SVG drawings into the page, so that its colours are theirs."""

    def put(match: re.Match[str]) -> str:
        drawing = (DOCS / match[2]).read_text(encoding="utf-8")
        return split_panels(drawing).replace("\n", "")

    return DRAWING.sub(put, markdown)


def make_gallery() -> str:
    """Return all reproduced figures of docs/results.md, published next to measured."""
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    cards = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        image = re.search(r"!\[[^\]]*\]\(([^)]+)\)", body)
        table = re.search(r"(?:^\|.*\n)+", body, re.MULTILINE)
        if image and table:
            anchor = re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
            command = re.search(r"```sh\n(fednorm reproduce .*?)\n```", body, re.DOTALL)
            cards.append("\n\n".join([
                f"## {title}", f"[{image[0]}]({image[1]})",  # opens at full size
                table[0].strip(),
                (f"Made by `{command[1]}`. " if command else "")
                + f"[Setting, length and what it shows](results.md#{anchor}).",
            ]))  # fmt: skip
    lead = re.search(r"^# .*\n\n((?:.+\n)+)", text)
    return "\n\n".join([
        "# Results gallery",
        lead[1].strip() if lead else "",
        *cards,
    ]) + "\n"  # fmt: skip


def read_title(path: Path) -> str:
    """Return the title of a notebook: its first heading."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")


def convert_notebook(path: Path) -> str:
    """Return a notebook as Markdown, with the outputs that it holds."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [text for output in cell["outputs"] if (text := convert_output(output))]
    title, *rest = parts
    note = f'<a href="{path.name}" download>Download this notebook</a>; the tests run it.'
    first, _, body = title.partition("\n")
    return "\n\n".join([first, note, body.strip(), *rest]) + "\n"


def convert_output(output: dict) -> str:
    """Return an output of a cell as Markdown."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f'<div class="figure">{"".join(data["image/svg+xml"])}</div>'
    if "image/png" in data:
        return f"![](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text") or data.get("text/plain") or "")
    return (
        f'<div class="output" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>' if text else ""
    )
