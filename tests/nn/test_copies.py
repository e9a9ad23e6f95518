"""What a copy would lose is refused by name, through every way into the library."""

import copy

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.cli import app
from fednorm.core.round import broadcast, client_round
from fednorm.doctor import examine
from fednorm.engines import barrier, processes, stacked
from fednorm.errors import ConfigError, ConversionError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from fednorm.nn.copies import copy_model
from fednorm.strategies import STRATEGIES
from support import ToyClients, task_of, why_not

QUICK = {"rounds": 1, "seeds": 1, "clients": 2}
STEP = create_algorithm("dsgd", lr=0.1)


def plain():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)]
    return nn.Sequential(*layers)


def hooked():
    model = plain()
    model[1].weight.register_hook(lambda gradient: 0 * gradient)
    return model


def hooked_after():
    model = plain()
    model[4].bias.register_post_accumulate_grad_hook(lambda _: None)
    return model


def lazy():
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 10)]
    return nn.Sequential(*layers)


REFUSED = {
    hooked: r"parameter '1\.weight' of Sequential has a hook.* remove it",
    hooked_after: r"parameter '4\.bias' of Sequential has a hook.* remove it",
    lazy: r"layer '2' \(LazyBatchNorm1d\) has no shape yet; run one batch through the model",
}
WAYS = {
    "compare": lambda make: fednorm.compare(["fbn"], model=make(), **QUICK),
    "compare, made there": lambda make: fednorm.compare(["fbn"], model=make, **QUICK),
    "centralized": lambda make: fednorm.compare(["centralized"], model=make(), **QUICK),
    "simulate": lambda make: fednorm.simulate("fbn", model=make(), rounds=1, clients=2),
    "doctor": lambda make: examine(make(), shape=(1, 8, 8), classes=10),
    "doctor, made there": lambda make: examine(make, shape=(1, 8, 8), classes=10),
    "doctor with data": lambda make: examine(make(), data="digits", partition="iid", budget=0),
}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("make", list(REFUSED))
def test_refused_by_name(make, way):
    with pytest.raises(ConfigError, match=REFUSED[make]):
        WAYS[way](make)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("make", list(REFUSED))
def test_every_strategy_refuses(make, name):
    with pytest.raises(ConversionError, match=REFUSED[make]):
        task_of(name, STEP, model=make())


@pytest.mark.parametrize("make", list(REFUSED))
@pytest.mark.parametrize("command", ["compare", "doctor"])
def test_the_command_line_refuses(make, command, tmp_path):
    model, one = f"{__name__}:{make.__name__}", ["--strategies", "fbn", "--seeds", "1"]
    arguments = {
        "compare": ["compare", *one, "--model", model, "--workers", "1", "--out", str(tmp_path)],
        "doctor": ["doctor", model],
    }
    with pytest.raises(ConfigError, match=REFUSED[make]):
        CliRunner().invoke(app, arguments[command], catch_exceptions=False)


def test_a_hook_that_was_removed_is_no_hindrance():
    model = plain()
    model[1].weight.register_hook(lambda gradient: gradient).remove()
    assert fednorm.compare(["fbn"], model=model, **QUICK).runs[0].status == "finished"


def test_a_lazy_model_that_has_run_is_no_hindrance():
    model = lazy()
    model(torch.randn(2, 1, 8, 8))
    assert fednorm.compare(["fbn"], model=model, **QUICK).runs[0].status == "finished"


def test_a_workspace_that_was_given_hooks_is_trained_where_it_is_and_copied_nowhere():
    """The loop trains the workspace itself, so a hook on it acts; engines that copy refuse."""
    clients = ToyClients(classes=10)
    task = task_of("fbn", STEP, model=plain().double())
    task.model[1].weight.register_hook(lambda gradient: 0 * gradient)
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, fednorm.ClientState(), clients.batches(0, 1))
    assert not reply.update["1.weight"].any()
    assert reply.update["1.bias"].any()
    batches = [clients.batches(client, 1) for client in clients.all()]
    assert why_not("stacked", task, clients)
    for copying in (
        lambda: copy_model(task.model),
        lambda: stacked.StackedClients(task, 2),
        lambda: processes.WorkerPool(task, clients, 1),
        lambda: barrier.BarrierTrainer(task, 10**9).train(received, {}, batches),
    ):
        with pytest.raises(ConversionError, match=r"parameter '1\.weight'"):
            copying()


class Treated(nn.Linear):
    """The remedy that the message names: the hook is part of the forward pass."""

    def forward(self, x):
        weight = self.weight.view_as(self.weight)
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return nn.functional.linear(x, weight, self.bias)


def test_a_hook_in_the_forward_pass_acts_in_every_copy():
    model = plain()
    model[1] = Treated(64, 8)
    task = task_of("fbn", STEP, model=copy.deepcopy(model).double())
    received = broadcast(task, task.initial_state)
    batches = ToyClients(classes=10).batches(0, 1)
    reply, _ = client_round(task, received, fednorm.ClientState(), batches)
    assert reply.update["1.weight"].abs().max() == 1e-3


def test_hooks_of_modules_are_copied():
    calls = []
    model = plain()
    model[1].register_forward_hook(lambda *_: calls.append(1))
    assert fednorm.compare(["fbn"], model=model, **QUICK).runs[0].status == "finished"
    assert calls


def test_hooks_that_cannot_travel_to_processes_keep_a_run_in_one():
    model = plain()
    model[1].register_forward_hook(lambda *_: None)
    settings = {**QUICK, "strategies": ["fbn"], "algorithm": "fedavg", "rounds": 10**6}
    experiment = build_experiment(settings)
    assert prepare(experiment, experiment.strategies[0], 0, plain()).count_workers(4) == 4
    assert prepare(experiment, experiment.strategies[0], 0, model).count_workers(4) == 1
    with pytest.raises(ConfigError, match="a model that can be pickled, hooks included"):
        fednorm.compare(["fbn"], model=model, engine="processes", **QUICK)
