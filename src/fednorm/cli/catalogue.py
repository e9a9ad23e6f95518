"""`fednorm list` and `fednorm show`."""

from typing import Annotated

import typer

from fednorm import catalogue
from fednorm.cli.options import console


def list_(
    kind: Annotated[
        str | None, typer.Argument(help=f"one of {', '.join(catalogue.KINDS)}; all if not given")
    ] = None,
) -> None:
    """List what can be chosen: strategies, algorithms, aggregators, attacks, data and models."""
    for name in [catalogue.kind(kind)] if kind else list(catalogue.KINDS):
        console.print(catalogue.listing(name))


def show(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(catalogue.KINDS)}")],
    name: Annotated[str, typer.Argument(help="a name that `fednorm list` shows")],
) -> None:
    """Show what a method does, its paper and its parameters.

    Example: `fednorm show strategy fbn`
    """
    console.print(catalogue.description(catalogue.kind(kind), name))
