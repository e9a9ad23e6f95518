"""The parts of the documentation that are generated: the tree and the doctor's example.

`python tests/docs/regenerate.py` rewrites them. Descriptions of folders are kept as they are in
CONTRIBUTING.md; a folder that has none yet gets "TODO", which the tests refuse.
"""

import re
import textwrap
from pathlib import Path

from rich.console import Console

from fednorm.doctor import Budget, examine, show

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fednorm"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCTOR = ROOT / "docs" / "doctor.md"
TREE = re.compile(r"(<!-- tree -->\n```text\n)(.*?)(```\n<!-- /tree -->)", re.DOTALL)
EXAMPLE = re.compile(r"(<!-- example -->\n```text\n)(.*?)(```\n<!-- /example -->)", re.DOTALL)
FOLDER = re.compile(r"^(\S+/)(?: +(.*))?$")
WIDTH = 96
MISSING = "TODO"


def list_files():
    """Return the files of every folder of the package, by the folder's path in the tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            folder = path.parent.relative_to(PACKAGE).as_posix()
            name = "src/fednorm/" if folder == "." else f"{folder}/"
            if path.name != "__init__.py" or name == "src/fednorm/":
                found.setdefault(name, []).append(path.name.removesuffix(".py"))
            else:
                found.setdefault(name, [])
    return found


def read_tree():
    """Return the tree of CONTRIBUTING.md: description and files by folder."""
    tree = {}
    for line in TREE.search(CONTRIBUTING.read_text(encoding="utf-8"))[2].splitlines():
        if head := FOLDER.match(line):
            tree[head[1]] = (head[2] or "", [])
            last = tree[head[1]][1]
        else:
            last += line.split()
    return tree


def sort_folders(folders, known):
    """Return the folders in the order of CONTRIBUTING.md; a new one follows its parent."""
    order = [name for name in known if name in folders]
    for name in folders:
        if name not in order:
            parent = f"{Path(name).parent.as_posix()}/"
            order.insert(order.index(parent) + 1 if parent in order else len(order), name)
    return order


def render_tree():
    """Return the tree as it is, with the descriptions that CONTRIBUTING.md has."""
    files, known = list_files(), read_tree()
    lines = []
    for name in sort_folders(files, known):
        lines.append(f"{name:<18} {known.get(name, (MISSING,))[0]}")
        if files[name]:
            lines += textwrap.wrap(
                " ".join(files[name]),
                WIDTH,
                initial_indent="    ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


def render_example():
    """Return what the command in docs/doctor.md prints."""
    console = Console(width=80, color_system=None)
    setting = {"data": "digits", "partition": "gamma=0", "rounds": 160}
    with console.capture() as captured:
        console.print(show(examine("mlp", **setting, budget=Budget(rounds=48))))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def rewrite(path, pattern, new):
    """Replace the generated part of a page."""
    text = path.read_text(encoding="utf-8")
    path.write_text(pattern.sub(lambda m: m[1] + new + m[3], text), encoding="utf-8")


if __name__ == "__main__":
    rewrite(CONTRIBUTING, TREE, render_tree())
    rewrite(DOCTOR, EXAMPLE, render_example())
