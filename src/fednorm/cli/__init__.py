"""The command line: reads options, calls the library, prints; it holds no logic.

Commands import torch and all that needs it when they run, so that help, lists and shell completion
answer at once.
"""

import sys

import typer
from rich.markup import escape

from fednorm.cli.compare import compare, run
from fednorm.cli.data import app as data
from fednorm.cli.doctor import doctor
from fednorm.cli.listing import list_, show
from fednorm.cli.options import INTERRUPTED, Command, errors
from fednorm.cli.reproduce import reproduce, ring
from fednorm.errors import FednormError
from fednorm.system import keep_memory

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Normalization layers that are right in federated learning.\n\n"
    "Try `fednorm compare`: it shows in a minute, on embedded data, why BatchNorm breaks in "
    "federated learning and which strategies fix it.",
)
app.command(cls=Command)(compare)
app.command(cls=Command)(run)
app.command(cls=Command)(reproduce)
app.add_typer(data, name="data")
app.command()(ring)
app.command(cls=Command)(doctor)
app.command("list")(list_)
app.command()(show)


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
    except KeyboardInterrupt:
        errors.print("Interrupted before the first run; nothing was written.")
        sys.exit(INTERRUPTED)
