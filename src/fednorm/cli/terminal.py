"""What commands write: the consoles, and help with options in groups, a line each."""

import inspect
from typing import Any

import click
import typer
from click.exceptions import NoSuchOption
from rich.console import Console
from typer.core import TyperCommand

from fednorm.registry import RENAMED

console = Console()
errors = Console(stderr=True)

_GROUPS = {
    "Federation": (
        *("strategies", "data", "data_dir", "model", "partition", "clients"),
        "participation",
    ),
    "Training and evaluation": (
        *("algorithm", "lr", "momentum", "rounds", "batch_size", "local_steps", "local_epochs"),
        *("seeds", "eval_every", "evaluate", "diagnose"),
    ),
    "Faults": (
        *("attack", "attack_target", "byzantine", "aggregator", "statistics_aggregator"),
        "client_dropout",
    ),
    "Machine": ("device", "threads", "workers"),
    "Files": ("config", "settings", "swept", "tuned", "out", "checkpoint_every", "resume", "fresh"),
}
_MANY = 30  # options, with which the help is to fit on a screen
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


class Command(TyperCommand):
    """A command with options in groups; it tells the new name of an option that was renamed."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's context is click's
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            new = RENAMED.get(error.option_name.lstrip("-").replace("-", "_"), "")
            option = f"--{new.replace('_', '-')}"
            if not any(option in parameter.opts for parameter in self.params):
                raise
            text = f"option '{error.option_name}' is now called '{option}'."
            raise NoSuchOption(error.option_name, text, ctx=ctx) from None

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the docstring; examples have a line each."""
        del ctx
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            text = " ".join(paragraph.replace("`", "").split())
            if text.startswith("- "):
                with formatter.indentation():
                    formatter.write_text(text.removeprefix("- "))
            else:
                formatter.write_paragraph()
                formatter.write_text(text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options, group by group, in columns that are the same for all."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        groups |= {group: [] for group in _GROUPS} | {"Options": []}
        for param in self.get_params(ctx):
            is_option = isinstance(param, click.Option)
            group = _GROUP_OF.get(param.name or "", "Options") if is_option else "Arguments"
            if param.name == "help" and len(self.params) > _MANY:
                continue  # whoever reads this knows it
            groups[group].append((_name(param), _explain(param)))
        widest = max(len(name) for records in groups.values() for name, _ in records)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl([(name.ljust(widest), text) for name, text in records])


def _name(param: click.Parameter) -> str:
    """Return how a parameter is given: `--set KEY=VALUE`, `--resume / --no-resume`, `NAME`."""
    if not isinstance(param, click.Option):
        return (param.name or "").upper()
    names = " / ".join(filter(None, (", ".join(param.opts), ", ".join(param.secondary_opts))))
    return f"{names} {param.metavar}" if param.metavar else names


def _explain(param: click.Parameter) -> str:
    """Return the help of a parameter, with its default unless the text has it."""
    text = str(getattr(param, "help", None) or "").replace("`", "")
    default: Any = param.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"{text} [{default}]" if plain and f"[{default}]" not in text else text
