"""Documentation of registry entries, read from their source.

Importing a strategy imports torch, which takes seconds; its docstring and its fields are in the
text of its module. A base class or a constant of another module of the package is looked up there.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class FieldDocs:
    """A field of an entry: its default, as text, and the sentence that explains it."""

    name: str
    default: str | None  # none if a value is needed
    help: str


@dataclass(frozen=True)
class EntryDocs:
    """An entry: one line, the text that explains it, and its fields."""

    summary: str
    text: str
    fields: tuple[FieldDocs, ...]


def read_entry(module: str, name: str) -> EntryDocs:
    """Return the documentation of the class `name` of a module.

    >>> read_entry("fednorm.strategies.gn", "GN").fields[0]
    FieldDocs(name='groups', default='2', help='groups of channels; must divide the channels \
of every layer')
    """
    tree = _parse(module)
    summary, _, text = (ast.get_docstring(_find(module, name)[1]) or "").partition("\n")
    fields = {field.name: field for field in _list_fields(module, name)}
    return EntryDocs(summary, text.strip() or ast.get_docstring(tree) or "", tuple(fields.values()))


@cache
def _parse(module: str) -> ast.Module:
    loader = getattr(find_spec(module), "loader", None)
    source: str | None = loader.get_source(module) if loader else None
    if source is None:
        raise ImportError(f"the source of {module} is not at hand.")
    return ast.parse(source)


def _find(module: str, name: str) -> tuple[str, Any]:
    """Return where a name of a module is defined, and its class or its value."""
    for node in _parse(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and name in (ast.unparse(t) for t in node.targets):
            return module, node.value
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _find(node.module or "", alias.name)
    return module, None


def _list_fields(module: str, name: str) -> Iterator[FieldDocs]:
    """Yield the fields of a dataclass, those of its bases first."""
    module, cls = _find(module, name)
    if not isinstance(cls, ast.ClassDef):
        return  # a class of another package, such as Protocol
    for base in reversed(cls.bases):
        yield from _list_fields(module, ast.unparse(base).partition("[")[0])
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith(
            "ClassVar"
        ):
            yield _read_field(module, ast.unparse(node.target), node.value)


def _read_field(module: str, name: str, value: ast.expr | None) -> FieldDocs:
    """Read `default`, `param(default, help)` or `field(default_factory=…, metadata=…)`."""
    if not isinstance(value, ast.Call):
        return FieldDocs(name, None if value is None else _evaluate(module, value), "")
    given = dict(zip(("default", "help"), value.args, strict=False))
    given |= {keyword.arg or "": keyword.value for keyword in value.keywords}
    if "metadata" in given:
        given["help"] = given["metadata"].values[0]  # type: ignore[attr-defined]  # a dict
    default = _evaluate(module, given["default"]) if "default" in given else None
    if "default_factory" in given:
        default = {"dict": "{}", "list": "[]", "tuple": "()"}[ast.unparse(given["default_factory"])]
    text = ast.literal_eval(given["help"]) if "help" in given else ""
    return FieldDocs(name, default, inspect.cleandoc(text))


def _evaluate(module: str, value: ast.expr) -> str:
    """Return the text of a literal, or of a constant's value."""
    if isinstance(value, ast.Name):
        module, value = _find(module, value.id)
    return str(ast.literal_eval(value))
