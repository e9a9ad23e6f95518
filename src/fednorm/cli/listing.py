"""`fednorm list` and `fednorm show`: the entries of the registries."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.cli.entry_docs import FieldDocs, read_docstring, read_fields
from fednorm.cli.options import console
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS
from fednorm.models import MODELS
from fednorm.registry import Registry, unknown
from fednorm.report.format import Column, make_table
from fednorm.strategies import STRATEGIES

if TYPE_CHECKING:
    from rich.console import Group

KINDS: Mapping[str, Registry[Any]] = {
    "strategies": STRATEGIES,
    "algorithms": ALGORITHMS,
    "aggregators": AGGREGATORS | PRE_AGGREGATORS,
    "attacks": ATTACKS,
    "partitions": PARTITIONS,
    "data": DATASETS,
    "models": MODELS,
}
_SINGULAR = {"strategy": "strategies", "algorithm": "algorithms", "partition": "partitions"}
_SINGULAR |= {"aggregator": "aggregators", "attack": "attacks"}
_SINGULAR |= {"model": "models", "dataset": "data", "datasets": "data"}


def find_kind(name: str) -> str:
    """Return the kind that a user means, in singular or plural.

    >>> find_kind("strategy")
    'strategies'
    """
    found = _SINGULAR.get(name, name)
    if found not in KINDS:
        raise unknown("kind", name, KINDS)
    return found


def list_entries(kind: str) -> Table:
    """Return one line for each entry of a kind."""
    columns = [Column("name"), Column("description", wraps=True)]
    known = KINDS[kind]
    rows = ([name, read_docstring(*known.locate(name))[0]] for name in known)
    return make_table(columns, rows, title=kind, ruled=False)


def describe_entry(kind: str, name: str) -> "Group":
    """Return the method of an entry, its paper, and its parameters."""
    from rich.console import Group
    from rich.markdown import Markdown

    place = KINDS[kind].locate(name)
    summary, text = read_docstring(*place)
    heading = Text(f"{name}: {summary}\n", style="bold")
    return Group(heading, Markdown(text), Text(), _tabulate_parameters(read_fields(*place)))


def _tabulate_parameters(fields: list[FieldDocs]) -> Table | Text:
    if not fields:
        return Text("No parameters.")
    rows = []
    for field in fields:
        known = "none" if field.default == "None" else field.default
        default = "(needed)" if known is None else known
        rows.append([field.name, default, field.help])
    columns = [Column("name"), Column("default", wraps=True), Column("meaning", wraps=True)]
    return make_table(columns, rows, title="Parameters", ruled=False)


def list_(
    kind: Annotated[
        str | None, typer.Argument(help=f"one of {', '.join(KINDS)}; all if not given")
    ] = None,
) -> None:
    """List strategies, algorithms, aggregators, attacks, partitions, data sets and models."""
    for name in [find_kind(kind)] if kind else list(KINDS):
        console.print(list_entries(name))


def show(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(KINDS)}")],
    name: Annotated[str, typer.Argument(help="a name that `fednorm list` shows")],
) -> None:
    """Show a method, its paper and its parameters.

    Example: `fednorm show strategy fbn`
    """
    console.print(describe_entry(find_kind(kind), name))
