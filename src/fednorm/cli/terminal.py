"""What commands write: the consoles, help with grouped options, and what a conversion replaced."""

import inspect
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import typer
from click.exceptions import NoSuchOption
from rich.console import Console
from typer.core import TyperCommand

from fednorm.names import RENAMED

console = Console()
errors = Console(stderr=True)

_GROUPS = {
    "Federation": (
        *("strategies", "data", "data_dir", "model", "partition", "clients"),
        "participation",
    ),
    "Training and evaluation": (
        *("algorithm", "lr", "momentum", "rounds", "batch_size", "local_steps", "local_epochs"),
        *("seeds", "eval_every", "evaluate", "diagnose", "loss", "metrics", "callbacks", "extend"),
    ),
    "Faults": (
        *("attack", "attack_target", "byzantine", "aggregator", "statistics_aggregator"),
        "client_dropout",
    ),
    "Machine": ("device", "threads", "workers"),
    "Files": (
        "config",
        "settings",
        "swept",
        "tuned",
        "out",
        "checkpoint_every",
        "resume",
        "fresh",
        "keep_state",
    ),
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
            if text := self._explain_unknown(error.option_name):
                raise NoSuchOption(error.option_name, text, ctx=ctx) from None
            raise

    def _explain_unknown(self, given: str) -> str | None:
        """Return what replaces an option that this command does not have, or None."""
        from fednorm.experiment.schema.config import Experiment

        old = given.lstrip("-").replace("-", "_")
        key = RENAMED.get(old, old)
        option = f"--{key.replace('_', '-')}"
        options = {name for parameter in self.params for name in parameter.opts}
        if option in options:
            return f"option '{given}' is now called '{option}'."
        if "--set" in options and key in Experiment.model_fields:
            return f"'{given}' is no option but a key of experiments: use '--set {key}=VALUE'."
        return None

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first sentence for the list of commands, whole."""
        del limit
        return super().get_short_help_str(limit=sys.maxsize).replace("`", "")

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


@contextmanager
def show_conversions(console: Console) -> Iterator[None]:
    """Print what the conversion of a model replaced, a line for each strategy."""
    log, handler = logging.getLogger("fednorm.conversion"), logging.Handler()
    handler.emit = lambda record: console.print(  # type: ignore[method-assign]
        record.getMessage(), style="dim", highlight=False, markup=False
    )
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def catch_interrupts() -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C, or SIGTERM, sets; only the main thread can catch signals.

    Python raises KeyboardInterrupt wherever the program happens to be; in a destructor or a
    callback from compiled code the exception is lost. So the first one only sets a flag, which a
    run checks after each round; the second one interrupts at once.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()
        sys.stderr.write("Stopping after this round; Ctrl-C again stops at once.\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
