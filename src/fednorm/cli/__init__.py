"""The command line: reads options, calls the library, prints; it holds no logic.

Commands import torch and all that needs it when they run, so that help, lists and shell completion
answer at once.
"""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from fednorm.cli.compare import compare, run
from fednorm.cli.data import app as data
from fednorm.cli.doctor import check, doctor
from fednorm.cli.folders import export, report
from fednorm.cli.listing import list_, show
from fednorm.cli.reproduce import reproduce, ring
from fednorm.cli.terminal import Command, console, errors
from fednorm.errors import FednormError
from fednorm.system import keep_memory

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help="Normalization layers that are right in federated learning.\n\n"
    "Try `fednorm compare`: it shows in a minute, on embedded data, why BatchNorm breaks in "
    "federated learning and which strategies fix it.",
)
app.command(cls=Command)(compare)
app.command(cls=Command)(run)
app.command(cls=Command)(report)
app.command(cls=Command)(export)
app.command(cls=Command)(reproduce)
app.add_typer(data, name="data")
app.command(cls=Command)(ring)
app.command(cls=Command)(doctor)
app.command("list", cls=Command)(list_)
app.command(cls=Command)(check)
app.command(cls=Command)(show)


def _show_version(wanted: bool) -> None:
    if wanted:
        import fednorm

        console.print(f"fednorm {fednorm.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def read_options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="the version")
    ] = False,
) -> None:
    """Read the options that come before a command."""
    del version  # its callback has shown it


def main() -> None:
    """Run the command line; a user's mistake gets a message, not a traceback."""
    keep_memory()
    try:
        app()
    except (FednormError, OSError) as error:
        message = f"[bold red]Error:[/] {escape(str(error))}"
        errors.print(message, highlight=False, soft_wrap=True)
        sys.exit(2)
    except MemoryError:
        errors.print("[bold red]Error:[/] there is not enough memory; use smaller values.")
        sys.exit(2)
