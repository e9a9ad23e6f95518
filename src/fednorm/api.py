"""Experiments from Python: the same schema as the command line, plain results."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fednorm.core.strategy import Strategy
from fednorm.core.types import ClientId
from fednorm.errors import ConfigError
from fednorm.experiment.callbacks import parse_callbacks
from fednorm.experiment.callbacks.base import Follower, Monitor, check_callback, describe_callback
from fednorm.experiment.callbacks.progress import can_draw, show_progress
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.extension import extend_folder
from fednorm.experiment.objective import (
    ModelSource,
    describe_object,
    name_function,
    record_objects,
)
from fednorm.experiment.results import Comparison, RunResult
from fednorm.experiment.schema.load import build_experiment, describe_objects, find_held
from fednorm.experiment.trained_model import load_model
from fednorm.models.base import ModelConfig
from fednorm.objects import hold_objects


def compare(  # noqa: PLR0913 (each option is one choice)
    strategies: Sequence[str | dict[str, Any] | Strategy] | None = None,
    *,
    model: str | dict[str, Any] | ModelSource | ModelConfig | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    callbacks: str | Sequence[str | dict[str, Any] | Follower] = (),
    progress: bool | None = None,
    extend: bool = False,
    **settings: Any,
) -> Comparison:
    """Run strategies side by side and return all results.

    Args:
        strategies: names, tables such as `{"name": "fixbn", "freeze_round": "auto"}`, or objects.
            Your own class is "module:Class", or an object of it; see docs/plugins.md.
        model: a name, "package.module:function", an `nn.Module`, or a function that returns one.
            A function of an imported file may take the `shape` of a sample and `classes`.
        out: a folder in which every run is recorded; runs that it holds are not repeated.
        workers: processes that share the work; each makes a run, or trains clients of one.
        callbacks: names, tables such as `{"name": "early_stopping", "patience": 5}`, objects with
            methods of `fednorm.Callback`, or functions that get every round.
        progress: whether to show how far it is; by default in a terminal or a notebook.
        extend: train on from the rounds that `out` holds to `rounds` of them.
        settings: any key of the schema, such as `clients=20` or `partition="dirichlet=0.1"`. An
            algorithm, aggregator, attack or partition may be an object as well. `data`, `loss` and
            `metrics`, too: arrays `(x, y)`, data sets of torch or Hugging Face, a DataFrame, a list
            with a (train, test) pair per client, a `Path`; functions (outputs, targets); see
            docs/data.md.

    >>> result = compare(["fbn"], rounds=2, seeds=1, clients=3)
    >>> [run.status for run in result.runs]
    ['finished']
    """
    model = name_function(model)
    source = model if isinstance(model, nn.Module) or callable(model) else None
    if model is not None:
        settings["model"] = model if source is None else describe_object(source, workers)
    if strategies is not None:
        settings["strategies"] = list(strategies)
    callbacks = parse_callbacks(callbacks)
    objects = [check_callback(one) for one in callbacks if not isinstance(one, str | Mapping)]
    deciding = [one for one in objects if not getattr(one, "observes", False)]
    named = [one for one in callbacks if isinstance(one, str | Mapping)]
    settings["callbacks"] = [*named, *map(describe_callback, deciding)]
    settings = describe_objects(settings)
    apart = workers > 1 or settings.get("engine") in {"processes", "flower"}
    if apart and (found := find_held(settings)):
        raise ConfigError(
            f"{found} is a class of this session or script, which no other process can import; use "
            "workers=1 with another engine, or write the class in a file and import it from there."
        )
    folder = None if out is None else Path(out)
    recorded, held = record_objects(settings, workers)
    if source is not None:
        held[settings["model"]["content"]] = source
    with hold_objects(held):
        experiment = build_experiment(recorded)
        if extend:
            experiment = extend_folder(folder, experiment)
        console = Console()
        shown = can_draw(console) if progress is None else progress
        view = show_progress(experiment, console) if shown else nullcontext()
        with view as bars:
            monitor = Monitor([*([bars] if bars else []), *objects])
            return run_comparison(
                experiment, folder=folder, monitor=monitor, model=source, workers=workers
            )


def simulate(
    strategy: str | dict[str, Any] | Strategy, *, seed: int = 0, **settings: Any
) -> RunResult:
    """Run one strategy with one seed; takes what `compare` takes.

    >>> simulate("gn", rounds=2, clients=3).rounds
    2
    """
    if several := settings.keys() & {"seeds", "strategies"}:
        raise ConfigError(
            f"simulate runs one strategy with one seed; use fednorm.compare for {min(several)!r}, "
            "or write seed=0."
        )
    return compare([strategy], seeds=[seed], **settings).runs[0]


def load(
    source: str | Path, model: ModelSource | None = None, *, client: ClientId | None = None
) -> nn.Module:
    """Return a trained model in evaluation mode, of torch's layers where possible.

    Nothing is unpickled, and no code that the file names is run.

    Args:
        source: the folder of a run, such as "results/compare/runs/fbn-seed0", or its file
            `model.safetensors`; the folder of a comparison if it holds one run.
        model: the network as it was before training, or a function that returns one. It may be left
            out if the run chose one of fednorm's by its name.
        client: whose model, where clients keep layers for themselves, as in "fedbn".

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> run = simulate("fbn", rounds=2, clients=3, out=folder)
    >>> type(load(folder)[3]).__name__
    'BatchNorm1d'
    """
    return load_model(source, model, client=client)


__all__ = ["compare", "load", "simulate"]
