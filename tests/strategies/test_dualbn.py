"""dualbn: the backward means make the gradient that of one machine."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import RunningStats
from fednorm.core.moments import Moments
from fednorm.experiment.schema.load import build_experiment
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.nn.dual_norm import BackwardMeans, _Dual, add_backward_means
from fednorm.nn.folding import fold
from fednorm.nn.weight_std import StandardizedConv, standardize
from fednorm.strategies import create_strategy
from support import ToyClients, last, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05)


class Watched:
    """The oracle: torch's own BatchNorm on the union, with hooks that see both passes."""

    def __init__(self, standardized):
        model = nested_model()
        if standardized:
            options = {"scale_by_fan_in": True, "eps": 1e-6, "gain": False, "bias": False}
            model = standardize(model, **options).model
        self.model = model.train()
        self.inputs, self.grads = {}, {}
        for path, layer in self.model.named_modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_hook(lambda *a, path=path: self._forward(path, *a))

    def _forward(self, path, layer, inputs, output):
        del layer
        self.inputs[path] = inputs[0].detach()
        output.register_hook(lambda grad: self.grads.__setitem__(path, grad))

    def run(self, x, y):
        functional.cross_entropy(self.model(x), y).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}

    def running(self, path, samples):
        """The statistics of this very batch, forward and backward, by plain means."""
        moments = Moments.of(self.inputs[path])
        layer = self.model.get_submodule(path)
        normalised = functional.batch_norm(
            self.inputs[path], None, None, training=True, eps=layer.eps
        )
        delta = samples * self.grads[path]
        p, q = delta.mean((0, 2, 3)), (delta * normalised).mean((0, 2, 3))
        backward = RunningStats(torch.stack([p, q]), p.new_empty(0), 0)
        return RunningStats(moments.mean, moments.var, 0), backward


@pytest.mark.parametrize("sizes", [(5, 5, 5), (2, 7, 3)])
@pytest.mark.parametrize("standardized", [True, False])
def test_with_the_statistics_of_the_same_round_the_gradient_is_one_machines(sizes, standardized):
    clients = ToyClients(sizes=sizes)
    x, y = clients.union(1)
    oracle = Watched(standardized)
    expected = oracle.run(x, y)
    task = task_of("dualbn", STEP, weight_standardization=standardized)
    running = {}
    for path in task.initial_state.running:
        layer = path.removesuffix(".backward_means")
        forward, backward = oracle.running(layer, len(y))
        running[path] = forward if path == layer else backward
    state = task.initial_state.__class__(
        0, task.initial_state.weights, task.initial_state.buffers, running
    )
    received = broadcast(task, state)
    gradients = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0]
        for c in range(len(sizes))
    ]
    for name, value in expected.items():
        total = sum(r.examples * r.update[name] for r in gradients) / sum(sizes)
        torch.testing.assert_close(total, value, rtol=0, atol=1e-10)


def test_the_reported_means_pool_to_those_of_one_machine():
    """The server's p and q after one round from p = q = 0, r = 0, v = 1, against plain sums."""
    clients = ToyClients(sizes=(2, 7, 3))
    task = task_of("dualbn", STEP)
    after = last(task, clients, 1).state
    model = task.strategy.convert(nested_model()).model
    seen = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()

            def hook(module, inputs, output, path=path):
                normalised = (inputs[0] / (1 + module.eps) ** 0.5).detach()
                output.register_hook(lambda g: seen.__setitem__(path, (g, normalised)))

            layer.register_forward_hook(hook)
    x, y = clients.union(1)
    functional.cross_entropy(model(x), y).backward()
    # Only the last layer's incoming gradient does not depend on p and q of a layer above it.
    path = next(iter(seen))
    grad, normalised = seen[path]
    delta = len(y) * grad
    expected = torch.stack([delta.mean((0, 2, 3)), (delta * normalised).mean((0, 2, 3))])
    got = after.running[f"{path}.backward_means"]
    torch.testing.assert_close(got.mean, 0.1 * expected, rtol=0, atol=1e-12)
    assert got.num_batches == 1


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 4), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_backward_rule_is_the_explicit_formula(shape, affine):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True) if affine else None
    bias = torch.rand(3, dtype=torch.float64, requires_grad=True) if affine else None
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5
    means = BackwardMeans(mean, 0.1)
    means.means.copy_(torch.randn(2, 3))
    y = _Dual.apply(x, weight, bias, mean, var, 1e-5, means)
    dy = torch.randn_like(y)
    y.backward(dy)
    view = (1, 3, *[1] * (len(shape) - 2))
    scale = 1 / torch.sqrt(var + 1e-5)
    normalised = (x.detach() - mean.view(view)) * scale.view(view)
    p, q = (row.view(view) for row in means.means)
    gamma = weight.detach().view(view) if affine else 1.0
    b = shape[0]
    expected = gamma * scale.view(view) * (dy - p / b - normalised * q / b)
    torch.testing.assert_close(x.grad, expected)
    if affine:
        axes = [0, *range(2, len(shape))]
        torch.testing.assert_close(bias.grad, dy.sum(axes))
        torch.testing.assert_close(weight.grad, (dy * normalised).sum(axes))


def test_gradcheck_where_the_means_are_zero():
    """With p = q = 0 the backward pass is the derivative of the forward pass."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(2, dtype=torch.float64, requires_grad=True)
    mean, var = torch.randn(2).double(), torch.rand(2).double() + 0.5
    means = BackwardMeans(mean, 0.1)
    assert torch.autograd.gradcheck(
        lambda *a: _Dual.apply(*a, mean, var, 1e-5, means), (x, weight, bias)
    )


def test_without_both_parts_it_is_fbn():
    plain = last(task_of("fbn", STEP), ToyClients(), 5).state
    bare = last(
        task_of("dualbn", STEP, weight_standardization=False, backward_moments=False),
        ToyClients(),
        5,
    ).state
    for name, value in plain.weights.items():
        assert torch.equal(bare.weights[name], value)


def test_standardised_weights_are_a_switch_of_the_others_too():
    parts = last(task_of("dualbn", STEP, backward_moments=False), ToyClients(), 4).state
    fbn = last(
        task_of("fbn", STEP, weight_standardization=True, stats_momentum=0.1), ToyClients(), 4
    ).state
    for key, value in parts.weights.items():
        assert torch.equal(fbn.weights[key], value)
    for name in ("naive", "fixbn", "fbn", "fedtan", "brn", "switchnorm"):
        converted = create_strategy(name, weight_standardization=True).convert(nested_model()).model
        convs = [m for m in converted.modules() if isinstance(m, nn.Conv2d)]
        assert convs
        assert all(isinstance(conv, StandardizedConv) for conv in convs)


def test_several_steps_keep_all_four_fixed_and_move_them_once():
    task = task_of("dualbn", create_algorithm("fedavg", lr=0.05))
    state = last(task, ToyClients(steps=3), 1).state
    assert {r.num_batches for r in state.running.values()} == {3}


def test_the_checkpoint_is_torchs_own():
    converted = create_strategy("dualbn").convert(nested_model()).model
    assert list(fold(converted).state_dict()) == list(nested_model().state_dict())


def test_a_faulty_backward_mean_is_rejected_like_a_statistic():
    task, clients = task_of("dualbn", STEP), ToyClients()
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(3)
    ]
    path = next(p for p in replies[0].stats if p.endswith("backward_means"))
    report = replies[0].stats[path]
    bad = replace(report.moments, mean=report.moments.mean * float("nan"))
    stats = {**replies[0].stats, path: replace(report, moments=bad)}
    after = server_round(task, task.initial_state, [replace(replies[0], stats=stats), *replies[1:]])
    assert [r.client for r in after.rejected] == [0]
    assert path in after.rejected[0].reason


def test_layers_without_statistics_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(TypeError, match="tracks no running statistics"):
        add_backward_means(model, momentum=0.1, backward_momentum=0.1)
    assert to_fed_batch_norm(model).replaced


def test_warm_up_is_on_by_default():
    experiment = build_experiment({"strategies": ["dualbn", "fbn"]})
    dual, fbn = (experiment.make_strategy(e) for e in experiment.strategies)
    assert experiment.make_algorithm(dual).rate(25, 600) == pytest.approx(0.025)
    assert experiment.make_algorithm(dual).rate(50, 600) == pytest.approx(0.05)
    assert experiment.make_algorithm(fbn).rate(1, 600) == pytest.approx(0.05)
    off = build_experiment({"strategies": ["dualbn"], "algorithm": {"name": "dsgd", "warmup": 0}})
    assert off.make_algorithm(dual).rate(1, 600) == pytest.approx(0.05)
    assert fednorm.create_algorithm("dsgd", lr=1.0, warmup=4).rate(1, None) == 0.25
