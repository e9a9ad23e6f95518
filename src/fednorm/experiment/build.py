"""Build the data, clients, model and task of one run."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from fednorm.algorithms.fedavg import FedAvg
from fednorm.attacks.adversary import Adversary, choose_byzantine
from fednorm.attacks.base import DataInfo
from fednorm.attacks.simple import Backdoor
from fednorm.core.replies.privacy import Privacy, require_accountant
from fednorm.core.task import Task
from fednorm.data import Dataset, load_dataset
from fednorm.data.federation import Federation, build_federation
from fednorm.engines import ENGINES, count_processes, run_rounds
from fednorm.engines.base import (
    ClientSource,
    Engine,
    EngineRun,
    Faults,
    Limits,
    PoisonedClients,
    Progress,
    RoundResult,
)
from fednorm.engines.evaluation import is_personal
from fednorm.engines.merged_batch import MergedClients
from fednorm.experiment.objective import ModelSource, make_from_object, make_loss, make_metrics
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import Spec, StrategySpec
from fednorm.models import MODELS, create_model
from fednorm.names import warn_once
from fednorm.objects import OBJECT, find_object
from fednorm.system import has_bfloat16

if TYPE_CHECKING:  # Flower is an extra
    from fednorm.engines.flower.remote_clients import FlowerNodes

_SAFE_CHANNELS = 16
# Settings that do not change what a run computes, or are said by its entry and its seed.
_SAME_RESULT = {
    "strategies", "seeds", "engine", "device", "threads", "timeout", "client_state_memory",
    "eval_every", "tune", "callbacks",
}  # fmt: skip


@dataclass(frozen=True)
class PreparedRun:
    """One run, ready to start."""

    experiment: Experiment
    entry: StrategySpec
    seed: int
    setup: EngineRun
    federation: Federation
    data: Dataset
    data_info: DataInfo | None = None  # what an attack on data knows of them
    engine: Engine = ENGINES["loop"]
    kept: int = 0  # bytes that a client keeps between its rounds
    sent: int = 0  # bytes that a client sends in a round
    remote: "FlowerNodes | None" = None

    @property
    def task(self) -> Task:
        """The converted model with its strategy and algorithm."""
        return self.setup.task

    @property
    def clients(self) -> ClientSource:
        """The clients that train: the federation, or all of it as one machine."""
        return self.setup.clients

    @property
    def faults(self) -> Faults:
        """What goes wrong in the run."""
        return self.setup.faults

    def count_workers(self, free: int) -> int:
        """Return how many of `free` processes the run would use for its clients."""
        return count_processes(self.engine, replace(self.setup, processes=free))

    def bytes_per_round(self) -> int:
        """Return how many bytes the clients of a round send, and keep after it."""
        merged = self.entry.centralized or self.engine.name == "merged"
        return (1 if merged else len(self.clients.participants(1))) * (self.sent + self.kept)

    def rounds(self, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds, or those after `start`."""
        return run_rounds(self.engine, self.setup, start)


def load_data(experiment: Experiment, seed: int) -> Dataset:
    """Return the data of an experiment, downloaded if missing; the last result is cached."""
    return _load_data(experiment.data.model_dump_json(), seed)


@lru_cache(maxsize=1)
def _load_data(entry: str, seed: int) -> Dataset:
    chosen = Spec.model_validate_json(entry)
    return load_dataset(chosen.name, seed, **chosen.fields)


def clear_data_cache() -> None:
    """Forget the data that were loaded last."""
    _load_data.cache_clear()


def build_run(
    experiment: Experiment, entry: StrategySpec, seed: int, model: ModelSource | None = None
) -> PreparedRun:
    """Build one run without trying it."""
    experiment = experiment.for_entry(entry)
    dtype = getattr(torch, experiment.dtype)
    device = _find_device(experiment.device)
    data = load_data(experiment, seed).to(device, dtype)
    ours = model is None and MODELS.has_own(experiment.model.name)
    network = make_model(experiment, data, seed, model).to(device, dtype)
    if ours and data.has_images and channels_may_come_last(network):
        # A user's model may flatten with `view`, which this arrangement forbids.
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        data = replace(data, transform=replace(data.transform, channels_last=True))
    clients = build_clients(experiment, data, seed)
    task = _build_task(experiment, entry, network, data, seed)
    faults = _make_faults(experiment, task, clients, seed)
    data_info = _describe_data(faults, data)
    source: ClientSource = MergedClients(clients) if entry.centralized else clients
    if faults.adversary and data_info:
        source = PoisonedClients(clients, faults.adversary, data_info)
    setup = EngineRun(
        task,
        source,
        experiment.rounds,
        engine="loop" if entry.centralized else experiment.engine,
        faults=faults,
        ours=ours,
        participation=experiment.participation,
        segmentation=data.target in ("mask", "tokens"),
        threads=experiment.threads,
        timeout=experiment.timeout,
    )
    return PreparedRun(experiment, entry, seed, setup, clients, data, data_info)


def build_clients(experiment: Experiment, data: Dataset, seed: int) -> Federation:
    """Divide the data among the clients of an experiment."""
    return build_federation(
        data,
        experiment.partition_rule,
        experiment.plan,
        clients=experiment.clients,
        seed=seed,
        participation=experiment.participation,
        unseen=experiment.unseen_clients,
        independent=experiment.privacy is not None,
    )


def _build_task(
    experiment: Experiment, entry: StrategySpec, network: nn.Module, data: Dataset, seed: int
) -> Task:
    strategy = experiment.make_strategy(entry)
    aggregator, statistics_aggregator = experiment.aggregators
    on_cpu = experiment.device.startswith("cpu")
    if experiment.precision == "bf16" and on_cpu and not has_bfloat16():
        warn_once("this processor has no products in bfloat16; precision 'full' will be faster.")
    algorithm = experiment.make_algorithm(strategy)
    if entry.centralized and isinstance(algorithm, FedAvg):
        algorithm = algorithm.forget_clients()
    task = Task.build(
        network,
        strategy,
        algorithm,
        rounds=experiment.rounds,
        loss=make_loss(experiment, data, _find_device(experiment.device)),
        metrics=make_metrics(experiment, data),
        aggregator=aggregator,
        statistics_aggregator=statistics_aggregator,
        precision=experiment.precision,
        outlier_factor=experiment.outlier_factor,
        secure=experiment.secure,
        privacy=_make_privacy(experiment, entry, seed),
        clients=None if entry.centralized else experiment.clients - experiment.unseen_clients,
    )
    if task.privacy and is_personal(task):
        raise ValueError(
            "with privacy it cannot be tested: its BatchNorm layers stay on the clients, which is "
            "private, but their accuracies would be published; choose a strategy that shares them, "
            "or call client_round and server_round in your own loop."
        )
    if entry.centralized and is_personal(task):
        raise ValueError(
            f"{entry.strategy!r} keeps tensors on its clients, and a centralized run has none; "
            "choose a strategy that shares everything."
        )
    return task


def _make_privacy(experiment: Experiment, entry: StrategySpec, seed: int) -> Privacy | None:
    table = experiment.privacy
    if table is None:
        return None
    table.check(experiment)  # its engine may have been changed since
    require_accountant()
    plan = experiment.plan
    return Privacy(
        **table.model_dump(),
        clients=experiment.participation * (experiment.clients - experiment.unseen_clients),
        rate=experiment.participation,
        # Of an epoch the number of batches would tell the size of the client.
        batches=plan.steps or plan.epochs or 1,
        seed=_draw_noise_seed(experiment, entry, seed),
    )


def _draw_noise_seed(experiment: Experiment, entry: StrategySpec, seed: int) -> int:
    """Return a seed that depends on all settings: equal noise in two runs would cancel."""
    settings = experiment.model_dump_json(exclude=_SAME_RESULT)
    text = json.dumps([seed, entry.model_dump(mode="json"), settings], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _make_faults(experiment: Experiment, task: Task, clients: ClientSource, seed: int) -> Faults:
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
        limits=Limits(max_examples=experiment.max_examples),
        rollback=experiment.rollback,
    )


def _describe_data(faults: Faults, data: Dataset) -> DataInfo | None:
    """Return what an attack on data knows about them, or None for another attack."""
    attack = faults.adversary.attack if faults.adversary else None
    if attack is None or not attack.on_data:
        return None
    if data.target not in ("class", "mask", "tokens"):
        raise ValueError(
            f"an attack on data changes class labels, but those of {data.name!r} are "
            f"{'numbers' if data.target == 'values' else 'several labels per sample'}; choose "
            "another attack."
        )
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


def channels_may_come_last(network: nn.Module) -> bool:
    """Return False for models with which torch's CPU kernels corrupt memory in that arrangement.

    The backward pass of a strided 1x1 convolution of few channels (seen below 8, with torch 2.13
    and oneDNN) writes beyond its buffers.
    """
    return not any(
        max(conv.kernel_size) == 1 and max(conv.stride) > 1 and conv.in_channels < _SAFE_CHANNELS
        for conv in network.modules()
        if isinstance(conv, nn.Conv2d)
    )


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ValueError(
            f"device {name!r} cannot be used: this machine has none, or torch was installed "
            "without support for it; choose 'cpu', or 'auto' for a GPU if there is one."
        ) from None
    return device


def make_model(
    experiment: Experiment, data: Dataset, seed: int, model: ModelSource | None
) -> nn.Module:
    """Return the model of an experiment, or a copy of the user's module."""
    entry = experiment.model
    if model is None and entry.name.startswith(OBJECT):  # held, in a worker process
        model = find_object("model", entry.name, str(entry.fields.get("content")))
    if model is not None:
        return make_from_object(model, seed)
    return create_model(entry.name, data.shape, data.classes, seed, **entry.fields)
