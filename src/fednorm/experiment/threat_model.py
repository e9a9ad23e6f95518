"""What an experiment says of Byzantine and vanishing clients: checked, and made ready to run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from fednorm.aggregators import check_client_count
from fednorm.attacks import Adversary, Backdoor, DataInfo, choose_byzantine
from fednorm.core.task import Task
from fednorm.data import Dataset
from fednorm.data.sampling import count_participants
from fednorm.engines.base import ClientSource, Faults
from fednorm.experiment.specs import StrategySpec

if TYPE_CHECKING:
    from fednorm.experiment.config import Experiment


def check_adversity(experiment: "Experiment") -> None:
    """Raise ValueError if clients and rules do not go together."""
    trained, f = experiment.clients - experiment.unseen_clients, experiment.byzantine
    if f and 2 * f >= trained:
        raise ValueError(
            f"fewer than half of the {trained} clients can be Byzantine, but byzantine = {f}; "
            f"choose at most {(trained - 1) // 2}, or more clients."
        )
    taking_part = count_participants(trained, experiment.participation)
    for key, rule in zip(
        ("aggregator", "statistics_aggregator"), experiment.aggregators, strict=True
    ):
        try:
            check_client_count(rule, taking_part)
        except ValueError as error:
            raise ValueError(f"{key}, with {taking_part} clients in a round: {error}") from None
    if experiment.min_replies > taking_part:
        raise ValueError(
            f"min_replies = {experiment.min_replies}, but only {taking_part} clients take "
            "part in a round."
        )
    experiment.attack_rule  # noqa: B018 (raises an error that says what is wrong)
    if experiment.attack and not f and not _has_byzantine(experiment.strategies):
        raise ValueError(
            f"attack {experiment.attack.name!r} needs clients that make it; "
            "say how many with byzantine (--byzantine 3)."
        )


def _has_byzantine(entries: Iterable[StrategySpec]) -> bool:
    return any(entry.settings.get("byzantine") for entry in entries)


def make_faults(experiment: "Experiment", task: Task, clients: ClientSource, seed: int) -> Faults:
    """Return who lies and how, and how clients vanish."""
    attack, adversary = experiment.attack_rule, None
    if attack and experiment.byzantine:
        nothing = not attack.on_data and not task.layout.sharing
        if experiment.attack_target == "statistics" and nothing:
            raise ValueError(
                "it shares no statistics, so there is nothing to attack with "
                "attack_target = 'statistics'; choose 'updates', or another strategy."
            )
        liars = choose_byzantine(clients.all(), experiment.byzantine, seed)
        adversary = Adversary(attack, liars, experiment.attack_target, seed)
    return Faults(
        adversary,
        experiment.client_dropout,
        experiment.min_replies,
        seed,
        client_state_bytes=round(experiment.client_state_memory * 1e9),
    )


def make_world(found: Faults, data: Dataset) -> DataInfo | None:
    """Return what an attack on data knows of them, if it is one; raise if it does not fit them."""
    attack = found.adversary.attack if found.adversary else None
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
