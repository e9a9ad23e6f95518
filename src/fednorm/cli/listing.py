"""`fednorm list`, `fednorm show` and TAB: the entries of the registries, read from their source.

Importing a strategy imports torch, which takes seconds; its docstring and its fields are in the
text of its module. A base class or a constant of another module of the package is looked up there.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args

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
from fednorm.experiment.schema.config import Experiment
from fednorm.models import MODELS
from fednorm.registry import Registry, unknown
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
}
_KEYS = "keys"
_SINGULAR = {"strategy": "strategies", "dataset": "data", "datasets": "data"}
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


# What the shell offers on TAB.

Complete: TypeAlias = Callable[[str], list[str]]


def complete_key(key: str) -> Complete:
    """Return what completes the value of a key of the experiment.

    >>> complete_key("strategies")("gn,fixb"), complete_key("attack_target")("s")
    (['gn,fixbn'], ['statistics'])
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in _select(list_values(key), last)]

    return complete


def list_values(key: str) -> list[str]:
    """Return the values of a key that have names.

    >>> list_values("partition")[:2]
    ['iid', 'gamma=']
    """
    kind = {"statistics_aggregator": "aggregators"}.get(key, key)
    registry = KINDS.get(kind) or KINDS.get(f"{kind}s") or KINDS.get(f"{kind}es")
    if key == "partition" and registry:
        return [f"{name}=" if find_argument(name) else name for name in registry]
    if key == "device":
        return ["auto", "cpu", "cuda"]
    field = Experiment.model_fields.get(key)
    words = get_args(field.annotation) if field else ()
    return list(registry or (word for word in words if isinstance(word, str)))


def complete_setting(incomplete: str) -> list[str]:
    """Complete the key of `--set` and `--sweep`.

    >>> complete_setting("unseen_c")
    ['unseen_clients=']
    """
    return _select((f"{key}=" for key in Experiment.model_fields), incomplete)


def complete_kind(incomplete: str) -> list[str]:
    """Complete a kind of `list` and `show`."""
    return _select(KINDS, incomplete)


def complete_entry(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a name of the kind that `show` was given."""
    return _select(KINDS[find_kind(ctx.params["kind"])], incomplete)


def _select(values: Iterable[str], start: str) -> list[str]:
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
    """List strategies, algorithms, aggregators, attacks, partitions, data sets and models."""
    if kind in {"key", _KEYS}:
        console.print(_list_keys())
        return
    columns = [Column("name"), Column("description", wraps=True)]
    for title in [find_kind(kind)] if kind else list(KINDS):
        known = KINDS[title]
        write = _write_partition if title == "partitions" else str
        rows = ([write(name), read_docstring(*known.locate(name))[0]] for name in known)
        console.print(make_table(columns, rows, title=title, ruled=False))


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
        typer.Argument(help="a name that `fednorm list` shows", autocompletion=complete_entry),
    ],
) -> None:
    """Show a method, its paper and its parameters.

    Example: `fednorm show strategy fbn`
    """
    console.print(describe_entry(find_kind(kind), name))


def describe_entry(kind: str, name: str) -> Group:
    """Return the method of an entry, its paper, and its parameters."""
    from rich.markdown import Markdown

    place = KINDS[kind].locate(name)
    summary, text = read_docstring(*place)
    heading = Text(f"{name}: {summary}\n", style="bold")
    return Group(heading, Markdown(text), Text(), _tabulate_parameters(read_fields(*place)))


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
            case ast.ImportFrom(module=str(source)) if source.startswith("fednorm."):
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
