"""`fednorm compare` and `fednorm run`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednorm.cli.options import (
    Callbacks,
    CheckpointEvery,
    DataDir,
    Fresh,
    KeepState,
    LearningRate,
    Momentum,
    Out,
    Resume,
    Set,
    Workers,
    complete_setting,
    default_workers,
    exit_if_interrupted,
    list_overrides,
    option_help,
    prefetch,
    take_settings,
)
from fednorm.cli.terminal import catch_interrupts, console, errors, show_conversions
from fednorm.errors import ConfigError
from fednorm.experiment.callbacks import parse_callbacks
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import (
    build_experiment,
    expand_sweep,
    override_settings,
    parse_choices,
    read_toml,
)
from fednorm.report.format import format_toml

if TYPE_CHECKING:
    from fednorm.experiment.flower.submit import SuperLink
    from fednorm.experiment.job import CheckpointPolicy
    from fednorm.experiment.results import Comparison

_OPTIONS = (
    "strategies",
    "data",
    "data_dir",
    "model",
    "loss",
    "metrics",
    "partition",
    "clients",
    "participation",
    "algorithm",
    "lr",
    "momentum",
    "rounds",
    "batch_size",
    "local_steps",
    "local_epochs",
    "seeds",
    "eval_every",
    "evaluate",
    "attack",
    "attack_target",
    "byzantine",
    "aggregator",
    "statistics_aggregator",
    "client_dropout",
    "diagnose",
    "device",
    "threads",
)


_OF_ONE = "--extend, --superlink, --checkpoint-every, --no-resume and --keep-state"


@take_settings(_OPTIONS, {"seeds": "how many, or a list such as 0,7 [3]"})
def compare(  # noqa: PLR0913 (each option is one choice)
    given: dict[str, Any],
    *,
    data_dir: DataDir = None,
    lr: LearningRate = None,
    momentum: Momentum = None,
    callbacks: Callbacks = None,
    config: Annotated[Path | None, typer.Option(help="TOML file to start from")] = None,
    settings: Set = None,
    swept: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,…",
            help="several values of any key: lr=0.01,0.1",
            autocompletion=complete_setting,
        ),
    ] = None,
    tuned: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            metavar="KEY=VALUE,…",
            help="each at its best on validation data: lr=0.01,0.1",
            autocompletion=complete_setting,
        ),
    ] = None,
    out: Out = None,
    workers: Workers = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = True,
    fresh: Fresh = False,
    keep_state: KeepState = False,
) -> None:
    """Run strategies side by side and write a table, a plot and a report.

    Without options: 8×8 digits, 10 clients with one digit each. [Defaults] are in brackets;
    `fednorm list` shows all names, and `fednorm list keys` what --set takes. For example:

    - `fednorm compare --strategies centralized,naive,fbn --partition dirichlet=0.1`

    - `fednorm compare --model resnet --algorithm fedavg --local-steps 5`

    - `fednorm compare --config mine.toml --set algorithm.lr=0.1`
    """
    extra = list_overrides(given, lr, momentum, data_dir)
    plain = read_toml(config) if config else {}
    values = override_settings({**plain, **given}, [*extra, *(settings or [])])
    values = _add_callbacks(values, callbacks)
    for text in swept or []:
        values = expand_sweep(values, text)
    if tuned:
        values["tune"] = dict(parse_choices(text, "--tune") for text in tuned)
    experiment = build_experiment(values)
    folder = out or _choose_folder(experiment, config, plain)
    saving = _make_policy(checkpoint_every, resume=resume, keep=keep_state)
    _run(experiment, folder, workers, saving, fresh=fresh)


def run(  # noqa: PLR0913, PLR0917 (each option is one choice)
    config: Annotated[
        Path, typer.Argument(help="TOML file that describes the experiment, or a results folder")
    ],
    settings: Set = None,
    callbacks: Callbacks = None,
    extend: Annotated[
        int | None,
        typer.Option(min=1, metavar="ROUNDS", help="train on, up to this round"),
    ] = None,
    engine: Annotated[str | None, typer.Option(help=option_help("engine"))] = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="with engine flower: a running SuperLink"),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="certificate by which the SuperLink is known, for TLS")
    ] = None,
    out: Out = None,
    workers: Workers = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = True,
    fresh: Fresh = False,
    keep_state: KeepState = False,
) -> None:
    """Run an experiment from a TOML file, as `compare` writes it next to its results.

    A file with `[[panels]]` is several experiments on one page (docs/sweeps.md).

    For example:

    - `fednorm run results/compare/config.toml --set rounds=100`

    - `fednorm run results/latest --extend 1000`
    """
    saving = _make_policy(checkpoint_every, resume=resume, keep=keep_state)
    if config.is_dir():  # which holds what it is to hold
        config, out = _find_config(config), out or config.resolve()
    plain = read_toml(config)
    if "panels" in plain:
        if extend or superlink or saving != _make_policy(None, resume=True, keep=False):
            raise ConfigError(f"{_OF_ONE} are for one experiment, but {str(config)!r} has panels.")
        added = _add_callbacks(plain.get("experiment", {}), callbacks).get("callbacks", [])
        chosen = {"engine": engine, "callbacks": added if callbacks else None}
        sets = [f"{key}={format_toml(value)}" for key, value in chosen.items() if value]
        _run_panels(config, [*(settings or []), *sets], out, workers, fresh=fresh)
        return
    values = override_settings(plain, settings or []) | ({"engine": engine} if engine else {})
    values = _add_callbacks(values, callbacks)
    experiment = build_experiment(values | ({"rounds": extend} if extend else {}))
    if extend:
        from fednorm.experiment.extension import extend_folder

        if fresh or superlink or not resume:
            raise ConfigError("--extend goes without --fresh, --no-resume and --superlink.")
        out = out or config.resolve().parent
        experiment = extend_folder(out, experiment)
    folder = out or _choose_folder(experiment, config, plain)
    if superlink is None:
        _run(experiment, folder, workers, saving, fresh=fresh)
        return
    from fednorm.experiment.flower.submit import SuperLink
    from fednorm.experiment.run_folder import clear_folder

    if fresh:
        clear_folder(folder)
        saving = replace(saving, resume=False)
    _submit(experiment, SuperLink(superlink, root_certificates), folder, saving)


def _find_config(folder: Path) -> Path:
    """Return the configuration of a folder of results."""
    inner = sorted(folder.glob("*/config.toml"))
    if inner and not (folder / "config.toml").exists():
        raise ConfigError(
            f"{str(folder)!r} holds an experiment for each panel; name the folder of one, such as "
            f"{str(inner[0].parent)!r}."
        )
    return folder / "config.toml"


def _run_panels(
    config: Path, settings: list[str], out: Path | None, workers: int | None, *, fresh: bool
) -> None:
    from fednorm.cli.reproduce import run_panels
    from fednorm.experiment.run_folder import RESULTS, name_folder
    from fednorm.reproduce.run_figure import FigureRequest

    folder = out or RESULTS / name_folder("-".join([config.stem, *settings]))
    run_panels(FigureRequest(str(config), "full", settings), folder, workers, fresh=fresh)


def _choose_folder(experiment: Experiment, config: Path | None, plain: dict[str, Any]) -> Path:
    """Return a folder named after the file, or `compare`, and what differs from it."""
    from fednorm.experiment.run_folder import choose_folder

    if config is None:
        return choose_folder(experiment)
    base = config.resolve().parent.name if config.stem == "config" else config.stem
    try:
        reference = build_experiment(plain)
    except ConfigError:  # only what was set besides makes it an experiment
        reference = None
    return choose_folder(experiment, base, reference=reference)


def _add_callbacks(values: dict[str, Any], added: list[str] | None) -> dict[str, Any]:
    """Return the values with callbacks of the command line after those of the file."""
    if not added:
        return values
    before = parse_callbacks(values.get("callbacks", []))
    new = [one for text in added for one in parse_callbacks(text)]
    return {**values, "callbacks": [*before, *(one for one in new if one not in before)]}


def _make_policy(every: int | None, *, resume: bool, keep: bool) -> "CheckpointPolicy":
    from fednorm.experiment.job import CheckpointPolicy

    most = sys.maxsize if keep else CheckpointPolicy.most_kept
    return CheckpointPolicy(every, resume, most)


def _submit(
    experiment: Experiment, superlink: "SuperLink", out: Path, saving: "CheckpointPolicy"
) -> None:
    from fednorm.experiment.callbacks.base import Monitor
    from fednorm.experiment.callbacks.progress import show_progress
    from fednorm.experiment.flower.submit import submit

    if experiment.engine != "flower":
        raise ConfigError("--superlink needs --engine flower.")
    with show_progress(experiment, console, errors) as progress:
        comparison = submit(experiment, superlink, out, Monitor([progress]), saving)
    _show(comparison, out)


def _run(
    experiment: Experiment,
    out: Path,
    workers: int | None,
    saving: "CheckpointPolicy",
    *,
    fresh: bool,
) -> None:
    from fednorm.experiment.callbacks.base import Monitor
    from fednorm.experiment.callbacks.progress import show_progress
    from fednorm.experiment.comparison import run_comparison
    from fednorm.experiment.run_folder import clear_folder

    if fresh:
        clear_folder(out)
    prefetch(experiment)
    with (
        show_progress(experiment, console, errors) as progress,
        show_conversions(console),
        catch_interrupts() as stop,
    ):
        comparison = run_comparison(
            experiment,
            folder=out,
            monitor=Monitor([progress], stop),
            workers=workers or default_workers(experiment),
            saving=saving,
        )
    _show(comparison, out)


def _show(comparison: "Comparison", out: Path) -> None:
    """Write the report, and end the command as its runs ended."""
    from fednorm.experiment.run_folder import link_latest
    from fednorm.report.tables import build_table
    from fednorm.report.write import write_comparison

    report = write_comparison(comparison, out)
    link_latest(out)
    console.print(build_table(comparison, console.width))
    console.print(f"Report: {report}", soft_wrap=True, markup=False)
    told: set[str] = set()  # the table has no room for what to try
    for result in comparison.runs:
        diverged = result.status == "diverged" and result.strategy not in told
        if diverged or result.status == "stopped":
            told.add(result.strategy)
            text = f"{result.strategy}, seed {result.seed}, {result.status}: {result.error}"
            errors.print(text, markup=False)
    exit_if_interrupted(result.status for result in comparison.runs)
    if any(result.status == "stopped" for result in comparison.runs):
        raise typer.Exit(1)
