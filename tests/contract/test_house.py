"""The rules of the house in CONTRIBUTING.md that can be counted: files, names, imports."""

import ast
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "fednorm"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
SHARED_NAMES = {"base.py", "__init__.py"}
REGISTRIES = {"strategies", "algorithms"}  # a file for every method, however many there are
MOST_FILES, MOST_LINES, MOST_IN_A_FOLDER = 200, 400, 15

# Verbs whose base form ends as a participle does.
BASE_FORMS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}
IRREGULAR = {
    "begun", "bound", "built", "chosen", "drawn", "found", "given", "gone", "held", "kept", "known",
    "left", "lost", "made", "paid", "sent", "shown", "spent", "taken", "thrown", "told", "written",
}  # fmt: skip
# A verb before the participle makes a name an order: the participle says of what.
VERBS = {
    "accumulate", "allocate", "average", "check", "collect", "compare", "count", "describe", "draw",
    "find", "has", "is", "list", "load", "make", "mark", "normalize", "on", "open", "read",
    "refuse", "run", "select", "tell", "use", "write",
}  # fmt: skip


def name_module(path):
    """Return the module's name with dots."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_repeated(names):
    """List the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def is_participle(word):
    """Return whether a word is a past participle rather than a verb's base form."""
    return word in IRREGULAR or (word.endswith("ed") and word not in BASE_FORMS)


def is_bare_participle(name):
    """Return whether a function is named by a participle instead of a verb."""
    words = name.strip("_").lower().split("_")
    return len(words) <= 2 and is_participle(words[-1]) and words[0] not in VERBS


def list_functions(body):
    """Yield functions and methods; properties and constructors are named by nouns."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from list_functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            kinds = " ".join(ast.unparse(one) for one in node.decorator_list)
            if not re.search(r"property|classmethod|setter", kinds):
                yield node


def list_imports(path, modules):
    """Return the package's modules that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules - {name_module(path)}


def find_cycles(graph):
    """Return the groups of modules that import each other, directly or not (Tarjan)."""
    index, low, stack, cycles = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                cycles.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles


def test_file_names_are_unique():
    assert list_repeated(p.name for p in FILES if p.name not in SHARED_NAMES) == []


def test_class_names_are_unique():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    assert list_repeated(node.name for node in nodes if isinstance(node, ast.ClassDef)) == []


def test_there_are_not_too_many_files():
    assert len(FILES) <= MOST_FILES


def test_no_file_is_too_long():
    lines = {name_module(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_folder_has_too_many_files():
    folders = Counter(p.parent.relative_to(ROOT).as_posix() for p in FILES)
    crowded = {name: count for name, count in folders.items() if count > MOST_IN_A_FOLDER}
    assert {name: count for name, count in crowded.items() if name not in REGISTRIES} == {}


def test_functions_are_named_by_verbs():
    named = [(name_module(p), f.name) for p in FILES for f in list_functions(TREES[p].body)]
    assert [pair for pair in named if is_bare_participle(pair[1])] == []


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("_owned", True), ("kept", True), ("all_diverged", True), ("need", False),
        ("load_decoded", False), ("seed_all", False), ("embed", False),
        ("find_lost_replies", False),
    ],
)  # fmt: skip
def test_participles_are_recognised(name, bare):
    assert is_bare_participle(name) is bare


def test_imports_have_no_cycles():
    """Imports inside functions and under TYPE_CHECKING count as well."""
    modules = {name_module(path) for path in FILES}
    graph = {name_module(path): list_imports(path, modules) for path in FILES}
    assert sum(map(len, graph.values())) > len(FILES)
    assert find_cycles(graph) == []


def test_every_imported_package_is_declared():
    """What another package happens to bring can be missing after that package's next release."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.match(r"[\w-]+", one)[0] for group in lists for one in group}
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert {"torch", "typer"} <= imported
    packages = {"PIL": "pillow", "tomli_w": "tomli-w", "ray": "flwr"}  # Ray: flwr[simulation]
    assert {packages.get(name, name) for name in imported - {"fednorm"}} <= declared


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert find_cycles(graph) == [["b", "c"]]
