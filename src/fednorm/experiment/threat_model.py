"""Byzantine clients and dropouts of an experiment, ready to run."""

import torch

from fednorm.attacks import Adversary, Backdoor, DataInfo, choose_byzantine
from fednorm.core.task import Task
from fednorm.data import Dataset
from fednorm.engines.base import ClientSource, Faults
from fednorm.experiment.config import Experiment


def make_faults(experiment: Experiment, task: Task, clients: ClientSource, seed: int) -> Faults:
    """Return the Byzantine clients with their attack, and how often clients drop out."""
    attack, adversary = experiment.attack_rule, None
    if attack and experiment.byzantine:
        nothing = not attack.on_data and not task.layout.sharing
        if experiment.attack_target == "statistics" and nothing:
            raise ValueError(
                "it shares no statistics, so there is nothing to attack with "
                "attack_target = 'statistics'; choose 'updates', or another strategy."
            )
        byzantine = choose_byzantine(clients.all(), experiment.byzantine, seed)
        adversary = Adversary(attack, byzantine, experiment.attack_target, seed)
    return Faults(
        adversary,
        experiment.client_dropout,
        experiment.min_replies,
        seed,
        client_state_bytes=round(experiment.client_state_memory * 1e9),
    )


def describe_data(faults: Faults, data: Dataset) -> DataInfo | None:
    """Return what an attack on data knows about them, or None for another attack."""
    attack = faults.adversary.attack if faults.adversary else None
    if attack is None or not attack.on_data:
        return None
    if isinstance(attack, Backdoor):
        if not data.has_images or data.segmentation:
            raise ValueError(
                "backdoor needs images with one label each, but samples of "
                f"{data.name!r} have the shape {data.shape}"
                f"{' and a label in every pixel' if data.segmentation else ''}."
            )
        if attack.target >= data.classes or attack.size > min(data.shape[1:]):
            raise ValueError(
                f"backdoor has the target {attack.target} and a patch of {attack.size} pixels, "
                f"but {data.name!r} has {data.classes} classes and images of {data.shape[1:]}."
            )
    brightest = 1 if data.x.is_floating_point() else 255
    white = torch.full((1, *data.shape), brightest, dtype=data.x.dtype)
    return DataInfo(
        data.classes,
        data.transform.apply_evaluation(white, torch.zeros(1, dtype=torch.int64))[0][0],
    )
