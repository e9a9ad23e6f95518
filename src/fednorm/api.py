"""Experiments from Python: the same schema as the command line, plain results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.types import ClientId
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.model_object import ModelSource, describe_object
from fednorm.experiment.results import Comparison, RunResult
from fednorm.experiment.schema.load import build_experiment
from fednorm.experiment.trained_model import load_model


def compare(
    strategies: Sequence[str | dict[str, Any]] | None = None,
    *,
    model: str | dict[str, Any] | ModelSource | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    **settings: Any,
) -> Comparison:
    """Run strategies side by side and return all results.

    Args:
        strategies: names, or tables such as `{"name": "fixbn", "freeze_round": "auto"}`.
        model: a name, "package.module:function", an `nn.Module`, or a function that returns one.
        out: a folder in which every run is recorded; runs that it holds are not repeated.
        workers: processes that share the work; each makes a run, or trains clients of one.
        settings: any key of the schema, such as `clients=20` or `partition="dirichlet=0.1"`.

    >>> result = compare(["fbn"], rounds=2, seeds=1, clients=3)
    >>> [run.status for run in result.runs]
    ['finished']
    """
    source = model if isinstance(model, nn.Module) or callable(model) else None
    if source is not None and workers > 1:
        raise ConfigError(
            "a model given as an object cannot be sent to other processes; "
            'use workers=1, or name it as "package.module:function".'
        )
    if model is not None:
        settings["model"] = model if source is None else describe_object(source)
    if strategies is not None:
        settings["strategies"] = list(strategies)
    folder = None if out is None else Path(out)
    return run_comparison(build_experiment(settings), folder=folder, model=source, workers=workers)


def simulate(strategy: str | dict[str, Any], *, seed: int = 0, **settings: Any) -> RunResult:
    """Run one strategy with one seed; takes what `compare` takes.

    >>> simulate("gn", rounds=2, clients=3).rounds
    2
    """
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
