"""What can be chosen, read off the registries: the answers of `fednorm list` and `fednorm show`."""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.cli.options import console
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS
from fednorm.models import MODELS
from fednorm.registry import find, unknown
from fednorm.report.format import Column, make_table
from fednorm.strategies import STRATEGIES

KINDS: Mapping[str, Mapping[str, type]] = {
    "strategies": STRATEGIES,
    "algorithms": ALGORITHMS,
    "aggregators": {**AGGREGATORS, **PRE_AGGREGATORS},
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


def _summarize(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _explain(cls: type) -> str:
    """Return what follows the summary in the class docstring, or else the module's docstring."""
    following = (inspect.getdoc(cls) or "").partition("\n")[2].strip()
    return following or inspect.getdoc(sys.modules[cls.__module__]) or ""


def list_entries(name: str) -> Table:
    """Return one line for each entry of a kind."""
    columns = [Column("name"), Column("what it is", wraps=True)]
    rows = ([entry, _summarize(cls)] for entry, cls in KINDS[name].items())
    return make_table(columns, rows, title=name, ruled=False)


def describe_entry(kind_name: str, name: str) -> Group:
    """Return what an entry does, its paper, and its parameters."""
    cls: type = find(kind_name, KINDS[kind_name], name)
    return Group(
        Text(f"{name}: {_summarize(cls)}\n", style="bold"),
        Markdown(_explain(cls)),
        Text(),
        _tabulate_parameters(cls),
    )


def _tabulate_parameters(cls: Any) -> Table | Text:
    fields = dataclasses.fields(cls)
    if not fields:
        return Text("No parameters.")
    rows = []
    for field in fields:
        needed = field.default is dataclasses.MISSING
        default = "(needed)" if needed else "none" if field.default is None else str(field.default)
        rows.append([field.name, default, field.metadata.get("help", "")])
    columns = [Column("name"), Column("default", wraps=True), Column("meaning", wraps=True)]
    return make_table(columns, rows, title="Parameters", ruled=False)


def list_(
    kind: Annotated[
        str | None, typer.Argument(help=f"one of {', '.join(KINDS)}; all if not given")
    ] = None,
) -> None:
    """List what can be chosen: strategies, algorithms, aggregators, attacks, data and models."""
    for name in [find_kind(kind)] if kind else list(KINDS):
        console.print(list_entries(name))


def show(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(KINDS)}")],
    name: Annotated[str, typer.Argument(help="a name that `fednorm list` shows")],
) -> None:
    """Show what a method does, its paper and its parameters.

    Example: `fednorm show strategy fbn`
    """
    console.print(describe_entry(find_kind(kind), name))
