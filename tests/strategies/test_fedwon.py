"""FedWon: the formula of its kernels, and clipping against a literal loop in both algorithms."""

import math

import pytest
import torch
from torch import nn

import fednorm
from fednorm import ClientState, broadcast, client_round, create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.engines import loop, stacked
from fednorm.engines.merged_batch import MergedClients
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from fednorm.nn.weight_std import StandardizedConv2d
from fednorm.strategies.fedwon import agc
from support import ToyClients, in_processes, last, nested_model, task_of, why_not

LR = 0.05
BOTH = pytest.mark.parametrize("kind", ["dsgd", "fedavg"])


def two_headed():
    """Two linear layers, so that one of them is not the classifier."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)]
    return nn.Sequential(*body, nn.ReLU(), nn.Linear(5, 4)).double()


def clipped_by_loop(gradient, weight, clip):
    """Section 4.1 of the AGC paper, unit after unit."""
    rows = []
    for g, w in zip(gradient, weight, strict=True):
        most = max(math.hypot(*w.flatten().tolist()), 1e-3)
        norm = math.hypot(*g.flatten().tolist())
        rows.append(clip * most / norm * g if norm / most > clip else g)
    return torch.stack(rows)


def gradients_of_first_round(kind, clip):
    task = task_of("fedwon", create_algorithm(kind, lr=LR), model=two_headed(), clip=clip)
    received = broadcast(task, task.initial_state)
    update = client_round(task, received, ClientState(), ToyClients().batches(1, 1))[0].update
    scale = 1 if kind == "dsgd" else -1 / LR
    return {name: scale * value for name, value in update.items()}, received.state.weights


def test_kernels_follow_the_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    converted = create_strategy("fedwon").convert(model).model
    with torch.no_grad():
        converted[0].gain.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    gamma = math.sqrt(2 / (1 - 1 / math.pi))
    kernels = torch.stack(
        [
            gamma * gain * (k - k.mean()) / (k.var(correction=0) * 27 + 1e-4).sqrt()
            for gain, k in zip(converted[0].gain, model[0].weight, strict=True)
        ]
    )
    expected = nn.functional.conv2d(x, kernels, model[0].bias).relu()
    torch.testing.assert_close(converted(x), expected)


def test_no_norm_is_left_and_every_convolution_has_a_gain():
    conversion = create_strategy("fedwon").convert(nested_model())
    convs = [m for m in conversion.model.modules() if isinstance(m, nn.Conv2d)]
    assert [type(m) for m in convs] == [StandardizedConv2d] * 6
    assert all(m.gain.shape == (m.out_channels,) for m in convs)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in conversion.model.modules())
    assert len(conversion.replaced) == 12


def test_agc_is_the_literal_loop():
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (4, 2, 3, 3), (1, 1)):
        g, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        g[0] *= 1e-3  # a unit that needs no clipping
        w[-1] *= 1e-9  # a unit whose own norm is too small to count
        for clip in (0.01, 0.5, 100.0):
            result = agc(g, w, clip)
            torch.testing.assert_close(result, clipped_by_loop(g, w, clip), rtol=1e-12, atol=0)
    assert torch.equal(agc(torch.zeros(2, 3), torch.zeros(2, 3), 0.1), torch.zeros(2, 3))


@BOTH
def test_clipping_acts_on_weights_of_convolutions_and_hidden_layers(kind):
    clip = 0.01
    plain, weights = gradients_of_first_round(kind, None)
    clipped, _ = gradients_of_first_round(kind, clip)
    for name in ("0.weight", "4.weight"):
        expected = clipped_by_loop(plain[name], weights[name], clip)
        assert not torch.allclose(expected, plain[name])
        torch.testing.assert_close(clipped[name], expected, rtol=0, atol=1e-11)
    for name in ("0.gain", "0.bias", "4.bias", "6.weight", "6.bias"):
        torch.testing.assert_close(clipped[name], plain[name], rtol=0, atol=1e-11)


@BOTH
def test_a_generous_clip_changes_nothing(kind):
    plain, _ = gradients_of_first_round(kind, None)
    clipped, _ = gradients_of_first_round(kind, 1e6)
    for name, value in plain.items():
        assert torch.equal(clipped[name], value)


def test_later_steps_clip_by_the_weights_of_that_step():
    """A by-hand run of local SGD; clipping must not remember the weights of the conversion."""
    clip, clients = 0.05, ToyClients(steps=3)
    task = task_of("fedwon", create_algorithm("fedavg", lr=LR), model=two_headed(), clip=clip)
    received = broadcast(task, task.initial_state)
    update = client_round(task, received, ClientState(), clients.batches(0, 1))[0].update
    model = create_strategy("fedwon").convert(two_headed()).model
    for x, y in clients.batches(0, 1).steps:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                g = parameter.grad
                if name in ("0.weight", "4.weight"):
                    g = clipped_by_loop(g, parameter, clip)
                parameter.sub_(LR * g)
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - received.state.weights[name]
        torch.testing.assert_close(update[name], moved, rtol=0, atol=1e-12)


def test_a_layer_in_two_places_is_clipped_once_by_its_whole_gradient():
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 1, 3, padding=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(1), conv, nn.Flatten(), nn.Linear(64, 4)).double()
    grads = []
    for clip in (None, 0.01):
        task = task_of("fedwon", create_algorithm("dsgd", lr=LR), model=model, clip=clip)
        received = broadcast(task, task.initial_state)
        reply, _ = client_round(task, received, ClientState(), ToyClients().batches(0, 1))
        grads.append(reply.update["0.weight"])
    expected = clipped_by_loop(grads[0], model[0].weight, 0.01)
    torch.testing.assert_close(grads[1], expected, rtol=1e-10, atol=0)


# Batches of two sizes, and clients that are away: cohorts of several sizes, and single clients.
SOME = ToyClients(sizes=(4, 6, 4, 4, 6, 4), steps=2, absent={2: (1, 3), 3: (0,)})
DECAY, RHO, CLIP, COUNT = 1e-2, 0.9, 0.02, 3


class Plain:
    """Clients with a torch model each, trained and averaged by hand, clipped unit after unit."""

    def __init__(self, clip):
        self.clip, self.momenta = clip, {}
        model = create_strategy("fedwon").convert(two_headed()).model
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.model = model.train()

    def gradients(self, x, y):
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        for name in ("0.weight", "4.weight"):
            grads[name] = clipped_by_loop(grads[name], self.model.get_parameter(name), self.clip)
        return {n: g + DECAY * self.model.get_parameter(n).detach() for n, g in grads.items()}

    def load(self):
        self.model.load_state_dict(self.weights)

    def dsgd(self, client, steps):
        self.load()
        grads = self.gradients(*steps[0])
        old = self.momenta.get(client, {n: torch.zeros_like(g) for n, g in grads.items()})
        self.momenta[client] = {n: RHO * old[n] + (1 - RHO) * g for n, g in grads.items()}
        return {n: -LR * m for n, m in self.momenta[client].items()}, len(steps[0][1])

    def fedavg(self, _client, steps):
        self.load()
        momenta = {}
        for x, y in steps:
            for name, g in self.gradients(x, y).items():
                momenta[name] = RHO * momenta[name] + g if name in momenta else g
                self.model.get_parameter(name).data.sub_(LR * momenta[name])
        moved = {n: p.detach() - self.weights[n] for n, p in self.model.named_parameters()}
        return moved, sum(len(y) for _, y in steps)

    def run(self, kind, clients):
        for round_ in range(1, COUNT + 1):
            moves = [
                getattr(self, kind)(c, clients.batches(c, round_).steps)
                for c in clients.participants(round_)
            ]
            total = sum(examples for _, examples in moves)
            for name in self.weights:
                mean = sum(move[name] * examples for move, examples in moves) / total
                self.weights[name] = self.weights[name] + mean
        return self.weights


def clipping_task(kind, clip=CLIP):
    step = create_algorithm(kind, lr=LR, momentum=RHO, weight_decay=DECAY)
    return task_of("fedwon", step, model=two_headed(), clip=clip, count=COUNT)


def run_loop(task):
    return last(task, SOME, COUNT)


def run_stacked(task):
    assert why_not("stacked", task, SOME) is None
    cohorts = stacked.StackedTrainer(task, 4)
    *_, result = loop.rounds(task, SOME, COUNT, train=cohorts.train)
    assert max(cohorts.stacks) > 1
    return result


def run_processes(task):
    *_, result = in_processes(task, SOME, COUNT, stacked=True)
    return result


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("engine", [run_loop, run_stacked, run_processes])
def test_every_engine_clips_each_client_as_a_plain_loop_does(kind, engine):
    expected = Plain(CLIP).run(kind, SOME)
    unclipped = Plain(1e9).run(kind, SOME)
    weights = engine(clipping_task(kind)).state.weights
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
    assert max(float((unclipped[n] - expected[n]).abs().max()) for n in expected) > 1e-3


USUAL = {
    "model": "cnn",
    "clients": 6,
    "participation": 0.7,
    "partition": "dirichlet_unbalanced=0.5",
    "algorithm": {"name": "fedavg", "lr": 0.1, "momentum": 0.9},
    "local_steps": 3,
    "batch_size": 16,
    "rounds": 3,
    "seeds": 1,
}


@pytest.mark.slow
def test_the_engine_that_is_chosen_clips_as_the_loop_does():
    def finals(**settings):
        table = {"name": "fedwon", "clip": settings.pop("clip", 0.01)}
        result = fednorm.compare([table], **USUAL, **settings).runs[0]
        return result.final.loss, result.final.train_loss

    experiment = build_experiment({**USUAL, "strategies": [{"name": "fedwon", "clip": 0.01}]})
    assert prepare(experiment, experiment.strategies[0], 0).engine.name == "stacked"
    expected = finals(engine="loop")
    assert finals() == pytest.approx(expected, rel=1e-3)
    assert finals(clip="none") != pytest.approx(expected, rel=1e-2)


def test_merged_asked_for_by_name_is_refused_with_the_reason():
    settings = {**USUAL, "participation": 1.0, "algorithm": "dsgd", "local_steps": 1}
    table = {"name": "fedwon", "clip": 0.01}
    with pytest.raises(ConfigError, match="no clipped gradients"):
        fednorm.compare([table], **settings, engine="merged")


def test_feature_normalisation_on_top_clips_too():
    step = create_algorithm("dsgd", lr=LR)
    options = {"base": "fedwon", "options": {"clip": 0.01}}
    task = task_of("fedfn", step, model=two_headed(), **options)
    assert sorted(task.clips) == ["0.weight", "4.weight"]
    data = build_federation(
        load_dataset("digits", 0), "iid", Plan(20), clients=4, seed=0, participation=1.0
    )
    assert why_not("merged", task, data, ours=True)


def test_a_frozen_layer_stays_frozen():
    model = two_headed()
    model[0].requires_grad_(requires_grad=False)
    task = task_of("fedwon", create_algorithm("dsgd", lr=LR), model=model, clip=0.01)
    state = last(task, ToyClients(), 2).state
    for name in ("0.weight", "0.gain", "0.bias"):
        assert torch.equal(state.weights[name], task.initial_state.weights[name])


@pytest.mark.slow
def test_federated_equals_one_machine():
    clients, step = ToyClients(sizes=(2, 7, 1)), create_algorithm("dsgd", lr=LR)
    federated, central = (
        last(task_of("fedwon", step), c).state for c in (clients, MergedClients(clients))
    )
    for name, value in federated.weights.items():
        torch.testing.assert_close(value, central.weights[name], rtol=0, atol=1e-10)


def test_merged_only_without_clipping():
    """Each client clips its own gradient; the mean of clipped gradients is another thing."""
    data = build_federation(
        load_dataset("digits", 0), "iid", Plan(20), clients=4, seed=0, participation=1.0
    )
    step = create_algorithm("dsgd", lr=LR)
    assert why_not("merged", task_of("fedwon", step), data, ours=True) is None
    assert why_not("merged", task_of("fedwon", step, clip=0.01), data, ours=True)


@pytest.mark.parametrize("clip", [0, -0.1, float("nan")])
def test_clip_must_be_positive(clip):
    with pytest.raises(ValueError, match="clip must be positive"):
        create_strategy("fedwon", clip=clip)


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ValueError, match="FedWon needs convolutions, but Sequential has none"):
        create_strategy("fedwon").convert(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
