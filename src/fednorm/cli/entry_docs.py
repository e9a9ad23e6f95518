"""Documentation of registry entries, read from their source.

Importing a strategy imports torch, which takes seconds; its docstring and its fields are in the
text of its module. A base class or a constant of another module of the package is looked up there.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class FieldDocs:
    """A field of an entry: its default, as text, and the sentence that explains it."""

    name: str
    default: str | None  # none if a value is needed
    help: str


def read_docstring(module: str, name: str) -> tuple[str, str]:
    """Return the first line of the docstring of a class, and the text that explains it.

    That is the rest of its docstring or, if there is no more, the docstring of its module.

    >>> read_docstring("fednorm.errors", "ConfigError")[0]
    'A configuration that cannot be run; the message says what to change.'
    """
    summary, _, text = (ast.get_docstring(_find(module, name)[1]) or "").partition("\n")
    return summary, text.strip() or ast.get_docstring(_parse(module)) or ""


def read_fields(module: str, name: str) -> list[FieldDocs]:
    """Return the fields of a dataclass, those of its bases first.

    >>> read_fields("fednorm.strategies.gn", "GN")[0].default
    '2'
    """
    return list({field.name: field for field in _list_fields(module, name)}.values())


@cache
def _parse(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {module}.")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _find(module: str, name: str) -> tuple[str, Any]:
    """Return where a name of a module is defined, and its class or its value."""
    for node in _parse(module).body:
        match node:
            case ast.ClassDef(name=found) if found == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return module, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=True):
                    if ast.unparse(target) == name:
                        return module, value
            case ast.ImportFrom(module=str(source)) if source.startswith(PACKAGE):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return _find(source, alias.name)
    return module, None


def _list_fields(module: str, name: str) -> Iterator[FieldDocs]:
    """Yield the fields of a dataclass after those of its bases, which it may replace."""
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
        return FieldDocs(name, None if value is None else str(_evaluate(module, value)), "")
    given = dict(zip(("default", "help"), value.args, strict=False))
    given |= {keyword.arg or "": keyword.value for keyword in value.keywords}
    text = _evaluate(module, given["help"]) if "help" in given else ""
    if "metadata" in given:
        text = _evaluate(module, given["metadata"])["help"]
    default = str(_evaluate(module, given["default"])) if "default" in given else None
    if "default_factory" in given:
        default = {"dict": "{}", "list": "[]", "tuple": "()"}[ast.unparse(given["default_factory"])]
    return FieldDocs(name, default, text)


def _evaluate(module: str, value: ast.expr) -> Any:
    """Return a literal, or the value of a constant."""
    if isinstance(value, ast.Name):
        module, value = _find(module, value.id)
    return ast.literal_eval(value)
