"""Experiments on Flower: nodes, the app that a SuperLink runs, and its submission."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from fednorm.names import HOLD_OUT, check_allowed, trust_only


@contextlib.contextmanager
def open_experiment(description: str, allow: str) -> Iterator[Experiment]:
    """Yield an experiment that was sent to a machine; in the block only allowed code is imported.

    Args:
        description: the experiment as JSON.
        allow: modules whose functions and classes the machine's owner allows, with commas.
    """
    allowed = [name.strip() for name in allow.split(",") if name.strip()]
    with trust_only(allowed):
        # Building it imports the classes of strategies, aggregators and so on.
        settings = json.loads(description)
        settings.pop("callbacks", None)  # they run where the command runs
        experiment = build_experiment(settings)
        for part in (experiment, *map(experiment.for_entry, experiment.strategies)):
            for name in _list_datasets(part.data.model_dump()):
                check_allowed("data set", name, allowed)
            check_allowed("model", part.model.name, allowed)
            for metric in (part.metrics or {}).values():
                check_allowed("metric", metric.name, allowed)
            if part.loss is not None:
                check_allowed("loss", part.loss.name, allowed)
        yield experiment


def _list_datasets(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a data set; of one that is held out of another, the other's."""
    if data["name"] != HOLD_OUT:
        yield str(data["name"])
    elif isinstance(of := data.get("of"), Mapping):
        yield from _list_datasets({"name": "", **of})
