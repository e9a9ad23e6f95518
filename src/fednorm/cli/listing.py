"""`fednorm list`, `fednorm show` and TAB: the entries of the registries, read from their source.

Importing a strategy imports torch, which takes seconds; its docstring and its fields are in the
text of its module. A base class or a constant of another module of the package is looked up there.
"""

import ast
import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.cli.terminal import console
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS
from fednorm.experiment.callbacks import CALLBACKS
from fednorm.experiment.schema.config import Experiment
from fednorm.models import MODELS
from fednorm.names import find_plugin, find_source, name_package, unknown, warn_once
from fednorm.registry import Registry
from fednorm.report.format import Column, format_toml, make_table
from fednorm.strategies import STRATEGIES


@dataclass(frozen=True)
class Centralized:
    """The reference: all clients' batches merged on one machine, with ordinary BatchNorm.

    What federated training would reach if the data could be gathered: every round is one step on
    the union of the batches that the clients draw, or as many steps as a client takes. No client
    is Byzantine, and none drops out.

    `centralized:gn` is the same with the layers of another strategy. A table takes the fields of
    that strategy: `{name = "centralized:gn", groups = 4}`.
    """


_REFERENCE: Registry[Any] = Registry(
    "strategy", __package__, {"centralized": "listing:Centralized"}
)

KINDS: Mapping[str, Registry[Any]] = {
    "strategies": STRATEGIES | _REFERENCE,
    "algorithms": ALGORITHMS,
    "aggregators": AGGREGATORS | PRE_AGGREGATORS,
    "attacks": ATTACKS,
    "partitions": PARTITIONS,
    "data": DATASETS,
    "models": MODELS,
    "callbacks": CALLBACKS,
    "losses": Registry("loss", __package__, {}),
    "metrics": Registry("metric", __package__, {}),
}
_ANY = {"data", "models", "callbacks", "losses", "metrics"}  # yours need not be a class of ours
_KEYS = "keys"
_SINGULAR = {"strategy": "strategies", "dataset": "data", "datasets": "data"}
_SINGULAR |= {"loss": "losses"}
_SINGULAR |= {kind.removesuffix("s"): kind for kind in KINDS if kind != "strategies"}


def find_kind(name: str) -> str:
    """Return the kind that a user means, in singular or plural.

    >>> find_kind("strategy")
    'strategies'
    """
    found = _SINGULAR.get(name, name)
    if found not in KINDS:
        raise unknown("kind", name, KINDS)
    return found


def complete_kind(incomplete: str) -> list[str]:
    """Complete a kind of `list` and `show`."""
    return select_start([*KINDS, _KEYS], incomplete)


def complete_entry(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a name of the kind that `show` was given."""
    kind = _SINGULAR.get(ctx.params["kind"], ctx.params["kind"])
    return select_start(KINDS[kind].list_names() if kind in KINDS else (), incomplete)


def select_start(values: Iterable[str], start: str) -> list[str]:
    """Return the values that begin with what was typed."""
    return [value for value in values if value.startswith(start)]


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"one of {', '.join(KINDS)}; or {_KEYS}, which --set takes",
            autocompletion=complete_kind,
        ),
    ] = None,
) -> None:
    """List strategies, algorithms, aggregators, attacks, partitions, data, models, callbacks.

    Those of installed packages are listed with the name of the package; losses and metrics have
    no others. Your own class needs no list: give it as module:Class, and try it with
    `fednorm check mine:Mine`.
    """
    if kind in {"key", _KEYS}:
        console.print(_list_keys())
        return
    columns = [Column("name"), Column("description", wraps=True)]
    for title in [find_kind(kind)] if kind else list(KINDS):
        known = KINDS[title]
        write = _write_partition if title == "partitions" else str
        rows = [[write(name), read_docstring(*known.locate(name))[0]] for name in known]
        rows += list(_list_plugins(title))
        if not rows:
            if kind:
                console.print(f"No package has {title}; give yours as package.module:function.")
            continue
        console.print(make_table(columns, rows, title=title, ruled=False))


def _list_plugins(kind: str) -> Iterator[list[str]]:
    """Yield name and description of what installed packages add; warn of what is broken."""
    for name, point in KINDS[kind].list_plugins().items():
        package = name_package(point)
        if find_source(point.module) is None:
            warn_once(f"package {package!r} registers {name!r}, but {point.module!r} is missing.")
            continue
        with contextlib.suppress(SyntaxError, UnicodeError):  # an import tells of it
            said = read_docstring(point.module, point.attr)[0]
            yield [name, f"{said} (package {package})"]


def _list_keys() -> Table:
    """Return the keys of an experiment, their defaults, and what they mean."""
    columns = [Column("key"), Column("default", wraps=True), Column("meaning", wraps=True)]
    rows = [
        [key, format_toml(field.default), str(field.description)]
        for key, field in Experiment.model_fields.items()
    ]
    return make_table(columns, rows, title=_KEYS, ruled=False)


def _write_partition(name: str) -> str:
    """Return a partition as it is written, such as "gamma=<gamma>"."""
    argument = find_argument(name)
    if argument is None:
        return name
    fields = {field.name: field for field in read_fields(*PARTITIONS.locate(name))}
    return f"{name}=<{argument}>" if fields[argument].default is None else f"{name}[=<{argument}>]"


def find_argument(partition: str) -> str | None:
    """Return the field that the text after "=" sets, if a partition has one.

    >>> find_argument("dirichlet")
    'alpha'
    """
    cls = _find(*PARTITIONS.locate(partition))[1]
    told = [ast.unparse(node.value) for node in cls.body if _assigns(node, "argument")]
    return ast.literal_eval(told[0]) if told else None


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name


def show(
    kind: Annotated[
        str, typer.Argument(help=f"one of {', '.join(KINDS)}", autocompletion=complete_kind)
    ],
    name: Annotated[
        str,
        typer.Argument(
            help="a name that `fednorm list` shows, or module:Class", autocompletion=complete_entry
        ),
    ],
) -> None:
    """Show a method, its paper and its parameters.

    Examples: `fednorm show strategy fbn`, `fednorm show strategy mine:Mine`
    """
    console.print(describe_entry(find_kind(kind), name))


def describe_entry(kind: str, name: str) -> Group:
    """Return the method of an entry, its paper, and its parameters."""
    from rich.markdown import Markdown

    place = KINDS[kind].locate(name)
    if KINDS[kind].has_own(name):
        (summary, text), fields = read_docstring(*place), read_fields(*place)
    else:
        known = KINDS[kind]
        found = find_plugin(known.kind, name, known) if kind in _ANY else known.find(name)
        summary, text = inspect_docstring(found)
        fields = inspect_fields(found)
    heading = Text(f"{name}: {summary}\n", style="bold")
    return Group(heading, Markdown(text), Text(), _tabulate_parameters(fields))


def _tabulate_parameters(fields: list["FieldDocs"]) -> Table | Text:
    if not fields:
        return Text("No parameters.")
    shown = {None: "(needed)", "None": "none"}
    rows = [[f.name, shown.get(f.default, f.default or ""), f.help] for f in fields]
    columns = [Column("name"), Column("default", wraps=True), Column("meaning", wraps=True)]
    return make_table(columns, rows, title="Parameters", ruled=False)


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
    place, node = _find(module, name)
    documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
    summary, _, text = ((ast.get_docstring(node) if documented else "") or "").partition("\n")
    return summary, text.strip() or ast.get_docstring(_parse(place)) or ""


def inspect_docstring(found: Any) -> tuple[str, str]:
    """Return what `read_docstring` does, of a class or function that was imported."""
    summary, _, text = inspect.cleandoc(found.__doc__ or "").partition("\n")
    module = inspect.getmodule(found)
    return summary, text.strip() or inspect.cleandoc(getattr(module, "__doc__", None) or "")


def inspect_fields(found: Any) -> list["FieldDocs"]:
    """Return what may be set of a dataclass, or of a function or class, that was imported."""
    if not dataclasses.is_dataclass(found):
        given: Mapping[str, inspect.Parameter] = {}
        with contextlib.suppress(ValueError):  # of a compiled function
            given = inspect.signature(found).parameters
        defaults = {key: p.default for key, p in given.items() if p.default is not p.empty}
        return [FieldDocs(key, str(default), "") for key, default in defaults.items()]
    fields = []
    for one in dataclasses.fields(found):
        default = None if one.default is dataclasses.MISSING else str(one.default)
        if one.default_factory is not dataclasses.MISSING:
            default = str(one.default_factory())
        fields.append(FieldDocs(one.name, default, one.metadata.get("help", "")))
    return fields


def read_fields(module: str, name: str) -> list[FieldDocs]:
    """Return the fields of a dataclass, those of its bases first.

    >>> read_fields("fednorm.strategies.gn", "GN")[0].default
    '2'
    """
    return list({field.name: field for field in _list_fields(module, name)}.values())


@cache
def _parse(module: str) -> ast.Module:
    source = find_source(module)
    if source is None:
        raise ImportError(f"there is no module {module}.")
    return ast.parse(source.read_text(encoding="utf-8"))


def _find(module: str, name: str) -> tuple[str, Any]:
    """Return where a name of a module is defined, and its class or its value."""
    for node in _parse(module).body:
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return module, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=True):
                    if ast.unparse(target) == name:
                        return module, value
            case ast.ImportFrom(module=str(source)) if _is_near(source, module):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return _find(source, alias.name)
    return module, None


def _is_near(source: str, module: str) -> bool:
    """Return whether a module is fednorm's, or of the package of the module that imports it."""
    return source.partition(".")[0] in {"fednorm", module.partition(".")[0]}


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
