"""Experiments on Flower: nodes, the app that a SuperLink runs, and its submission."""

from fednorm.experiment.schema.config import Experiment
from fednorm.registry import check_allowed


def read_experiment(description: str, allow: str) -> Experiment:
    """Return an experiment that was sent to a machine.

    Args:
        description: the experiment as JSON.
        allow: modules of which the machine's owner allows functions, separated by commas.
    """
    experiment = Experiment.model_validate_json(description)
    allowed = [name.strip() for name in allow.split(",") if name.strip()]
    check_allowed("data set", experiment.data.name, allowed)
    check_allowed("model", experiment.model.name, allowed)
    return experiment
