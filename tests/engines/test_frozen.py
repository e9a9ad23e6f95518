"""What the user froze with `.eval()` stays frozen: in every engine, whatever is tested when."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState, LayerStats, Reply
from fednorm.core.moments import Moments
from fednorm.core.round import (
    broadcast,
    client_calibration,
    client_round,
    server_calibration,
    server_round,
)
from fednorm.core.task import export
from fednorm.doctor.client_shift import converge_statistics
from fednorm.doctor.costs import FixedBatches
from fednorm.engines import merged_batch
from fednorm.engines.barrier import BarrierTrainer
from fednorm.engines.evaluation import adapt_statistics
from fednorm.engines.loop import rounds
from fednorm.engines.merged_batch import MergedClients
from fednorm.engines.stacked import StackedTrainer
from fednorm.models import create_model
from fednorm.strategies import STRATEGIES
from support import CLASSES, ToyClients, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05)
STEPS = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")
CLIENTS = ToyClients(sizes=(4, 6, 4, 5), steps=2, absent={2: (1,), 3: (0, 2)})
FROZEN = ("stem.1", "blocks.1.downsample.1")


def half_frozen():
    """A residual net in which two BatchNorm layers are frozen, with statistics of their own."""
    model = nested_model()
    torch.manual_seed(1)
    for path in FROZEN:
        layer = model.get_submodule(path).eval()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return model


def all_frozen():
    """As above, but all layers are frozen, and so is a dropout layer; γ and β do not learn."""
    model = half_frozen()
    model.flatten = nn.Sequential(nn.Flatten(), nn.Dropout(0.5).eval())
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval().requires_grad_(requires_grad=False)
    return model


def run(task, clients, count, *, tested=True, **settings):
    """Run rounds; `tested` exports the model after each, as an evaluation does."""
    results = []
    for result in rounds(task, clients, count, **settings):
        results.append(result)
        if tested:
            export(task, result.state, result.client_states.get(0))
    return results


def assert_same(ours, expected, tolerance=0.0):
    for name, value in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=tolerance, atol=tolerance)
    for path, running in expected.running.items():
        got = ours.running[path]
        torch.testing.assert_close(got.mean, running.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.var, running.var, rtol=tolerance, atol=tolerance)
        assert got.num_batches == running.num_batches


KEEP_LAYERS = sorted(
    name for name in STRATEGIES if task_of(name, STEP).layout.norms and name != "fedfn"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEP_LAYERS)
def test_statistics_stay_and_nothing_is_reported(name):
    model = half_frozen()
    *_, last = run(task_of(name, STEPS, model=model, count=3), CLIENTS, 3)
    start = task_of(name, STEPS, model=model).initial_state
    for path in FROZEN:
        layer = model.get_submodule(path)
        if path in last.state.running:
            running = last.state.running[path]
            assert torch.equal(running.mean, layer.running_mean)
            assert torch.equal(running.var, layer.running_var)
            assert running.num_batches == 0
        else:
            for client_state in last.client_states.values():
                assert torch.equal(client_state.tensors[f"{path}.running_mean"], layer.running_mean)
                assert torch.equal(client_state.tensors[f"{path}.running_var"], layer.running_var)
        for reply in last.replies:
            assert not any(key.startswith(path) for key in reply.stats)
    assert not last.rejected
    others = [path for path in last.state.running if not path.startswith(FROZEN)]
    if (
        task_of(name, STEPS, model=model).strategy.calibration != "evaluation"
    ):  # then nothing changes
        for path in others:
            assert not torch.equal(last.state.running[path].mean, start.running[path].mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_evaluations_in_between_change_nothing(name):
    tested, untested = (
        run(task_of(name, STEPS, model=half_frozen(), count=4), CLIENTS, 4, tested=tested)
        for tested in (True, False)
    )
    assert_same(tested[-1].state, untested[-1].state)
    assert [r.train_loss for r in tested] == [r.train_loss for r in untested]


def torchs(model, batches, rate):
    """Oracle: plain torch in training mode, frozen layers in evaluation mode, SGD on unions."""
    model = copy.deepcopy(model)
    assert model.training
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


# Of these, a layer that is frozen is torch's; the others change more than BatchNorm layers.
PLAIN = [
    "naive",
    "fixbn",
    "fbn",
    "fedtan",
    "fedbn",
    "silobn",
    "feddna",
    "hbn",
    "heterofl",
    "brn",
    "alignbn",
]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["clients", "one machine"])
@pytest.mark.parametrize("name", PLAIN)
def test_with_all_layers_frozen_a_step_is_that_of_torch_on_the_union(name, where):
    toy = ToyClients(sizes=(4, 6, 3), absent={2: (1,)})
    expected = torchs(all_frozen(), [toy.union(round_) for round_ in (1, 2, 3)], rate=0.05)
    task = task_of(name, STEP, model=all_frozen(), count=3)
    *_, last = run(task, toy if where == "clients" else MergedClients(toy), 3)
    for key, value in last.state.weights.items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_single_client_follows_torch_where_half_is_frozen():
    toy = ToyClients(sizes=(6,), steps=3)
    batches = [batch for round_ in (1, 2, 3) for batch in toy.batches(0, round_).steps]
    expected = torchs(half_frozen(), batches, rate=0.05).state_dict()
    for name in ("naive", "fedbn"):
        task = task_of(name, create_algorithm("fedavg", lr=0.05), model=half_frozen(), count=3)
        *_, last = run(task, toy, 3)
        got = export(task, last.state, last.client_states[0]).state_dict()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "dualbn", "fedbn", "hbn"])
def test_stacked(name):
    task = task_of(name, STEPS, model=half_frozen(), count=3)
    expected = run(task, CLIENTS, 3, tested=False)
    export(task, task.initial_state)  # trainer are made from the workspace as it is
    trainer = StackedTrainer(task, 2)
    got = run(task, CLIENTS, 3, train=trainer.train)
    assert 2 in trainer.stacks
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours.state, theirs.state, tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "fedtan", "heterofl"])
def test_merged(name):
    toy = ToyClients(sizes=(4, 6, 3), absent={2: (1,)})
    expected = run(task_of(name, STEP, model=half_frozen(), count=3), toy, 3, tested=False)
    task = task_of(name, STEP, model=half_frozen(), count=3)
    for ours, theirs in zip(merged_batch.rounds(task, toy, 3), expected, strict=True):
        export(task, ours.state)
        assert_same(ours.state, theirs.state, tolerance=1e-10)


@pytest.mark.slow
def test_barrier():
    task = task_of("fedtan", STEPS, model=half_frozen(), count=3)
    expected = run(task, CLIENTS, 3, tested=False)
    export(task, task.initial_state)
    got = run(task, CLIENTS, 3, train=BarrierTrainer(task, 10**9).train)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours.state, theirs.state)
        assert ours.exchanges == theirs.exchanges


def test_a_task_that_was_sent_to_another_process():
    task = task_of("fbn", STEPS, model=half_frozen())
    received, own = broadcast(task, task.initial_state), CLIENTS.batches(1, 1)
    expected, _ = client_round(task, received, ClientState(), own)
    export(task, task.initial_state)
    sent = pickle.loads(pickle.dumps(task))  # noqa: S301 (its own)
    reply, _ = client_round(sent, received, ClientState(), own)
    assert all(torch.equal(reply.update[name], value) for name, value in expected.update.items())
    assert reply.stats.keys() == expected.stats.keys()


@pytest.mark.parametrize("name", ["hbn", "heterofl", "alignbn"])
def test_calibration_leaves_it_out(name):
    task = task_of(name, STEP, model=half_frozen())
    state = task.initial_state
    export(task, state)
    rule = task.strategy.calibration_rule()
    answers = [
        client_calibration(
            task, broadcast(task, state), ClientState(), CLIENTS.all_batches(client), rule
        )
        for client in CLIENTS.all()
    ]
    after = server_calibration(task, state, answers)
    assert not after.rejected
    for path, running in after.running.items():
        stays = torch.equal(running.mean, state.running[path].mean)
        assert stays == (path in FROZEN)
        assert all((path in answer.stats) == (path not in FROZEN) for answer in answers)
    forged = Reply(
        9, 5, {}, {}, {FROZEN[0]: LayerStats(Moments(5.0, torch.zeros(4), torch.ones(4)), 1)}
    )
    (rejected,) = server_calibration(task, state, [*answers, forged]).rejected
    assert (rejected.client, rejected.where) == (9, FROZEN[0])


def test_adaptation_leaves_it_alone():
    task = task_of("fbn", STEP, model=half_frozen())
    model = export(task, task.initial_state)
    adapt_statistics(task, CLIENTS.all_batches(1), 0.5)
    assert not any(module.training for module in model.modules())
    for path, running in task.initial_state.running.items():
        stays = torch.equal(model.get_submodule(path).running_mean, running.mean)
        assert stays == (path in FROZEN)


def test_the_doctors_calibration_leaves_it_alone():
    task = task_of("dualbn", STEP, model=half_frozen())
    steps = {client: CLIENTS.batches(client, 1).steps for client in CLIENTS.all()}
    found = converge_statistics(task, FixedBatches(steps)).initial_state.running
    for path, running in task.initial_state.running.items():
        assert torch.equal(found[path].mean, running.mean) == path.startswith(FROZEN)


def test_who_reports_a_frozen_layer_is_rejected():
    task = task_of("fbn", STEP, model=half_frozen())
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), CLIENTS.batches(client, 1))[0]
        for client in (0, 1)
    ]
    forged = {**replies[1].stats, FROZEN[0]: replies[1].stats["blocks.0.bn1"]}
    state = server_round(task, task.initial_state, [replies[0], replace(replies[1], stats=forged)])
    assert [(r.client, r.where) for r in state.rejected] == [(1, FROZEN[0])]


def test_a_child_that_was_left_in_training_mode_trains():
    model = nested_model()
    model.blocks.eval()
    model.blocks[0].bn1.train()
    task = task_of("fbn", STEP, model=model)
    *_, last = run(task, CLIENTS, 2)
    assert set(last.replies[0].stats) == {"stem.1", "blocks.0.bn1"}


def test_of_a_model_that_was_just_tested_nothing_is_frozen():
    fresh = run(task_of("fbn", STEP), CLIENTS, 2)
    tested = run(task_of("fbn", STEP, model=half_frozen().train().eval()), CLIENTS, 2)
    assert fresh[-1].replies[0].stats.keys() == tested[-1].replies[0].stats.keys()
    mixed = nested_model().eval()
    mixed.stem[1].train()
    with pytest.raises(ValueError, match=r"layer 'stem\.1' \(BatchNorm2d\) is in training mode"):
        task_of("fbn", STEP, model=mixed)


class Fixed(nn.Module):
    """Keeps its own layer frozen, in the usual way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.other = nn.BatchNorm2d(1), nn.BatchNorm2d(1)
        self.last = nn.Linear(64, CLASSES)
        self.double()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.last(self.other(self.norm(x)).flatten(1))


@pytest.mark.parametrize("model", [Fixed, lambda: Fixed().train()], ids=["new", "training"])
def test_a_model_that_freezes_by_itself_is_left_to_do_so(model):
    results = run(task_of("naive", STEP, model=model()), CLIENTS, 2)
    assert [set(result.replies[0].stats) for result in results] == [{"other"}, {"other"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"adapt_statistics": 0.3}, {"diagnose": True}])
@pytest.mark.parametrize("name", ["naive", "fbn", "hbn", "centralized"])
def test_a_run_does_not_depend_on_how_often_it_is_tested(name, settings):
    """As users run it: in float32, unequal clients, some of them, several local steps."""
    model = create_model("resnet", (1, 8, 8), 8, 0, widths=(4, 6))
    model.stem[1].eval()
    values = {
        "rounds": 4, "clients": 6, "partition": "dirichlet_unbalanced=1", "participation": 0.5,
        "algorithm": "fedavg", "local_steps": 2, "batch_size": 8, "model": model,
        "data": {"name": "patterns", "samples": 120, "test": 60, "size": 8, "classes": 8},
    }  # fmt: skip
    often, once = (
        fednorm.simulate(name, **values, **settings, eval_every=every) for every in (1, 4)
    )
    assert often.status == once.status == "finished"
    assert often.final.loss == once.final.loss
    assert model.stem[1].num_batches_tracked == 0  # the user's own object is not touched
