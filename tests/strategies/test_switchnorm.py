"""Switchable normalization against its formula written out, and against the norms it mixes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import RoundContext
from fednorm.core.layout import find_kinds
from fednorm.core.types import Kind, Role
from fednorm.nn.batch_norm import FedBatchNorm2d
from fednorm.nn.convert import ConversionError
from fednorm.nn.switch_norm import (
    SwitchableNorm,
    SwitchNorm1d,
    SwitchNorm2d,
    SwitchNorm3d,
    to_switch_norm,
)
from support import ToyClients, last, nested_model, task_of

RANKS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE, LAYER, BATCH = 0, 1, 2


def randomised(layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return layer


def layer_of(cls, channels, **fields):
    return randomised(to_switch_norm(cls(channels, **fields).double()).model)


def batch(shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1


def set_to(layer, part):
    """Give one part all the weight: the others underflow to nothing."""
    with torch.no_grad():
        for mix in (layer.mean_mix, layer.var_mix):
            mix.zero_()
            mix[part] = 1000
    return layer


def moments(values):
    mean = values.sum() / values.numel()
    return mean, ((values - mean) ** 2).sum() / values.numel()


def by_hand(layer, x):
    """Sample by sample and channel by channel; parts that see one value do not take part."""
    rows = []
    for sample in x:
        row = []
        for c, values in enumerate(sample):
            across = moments(x[:, c])
            if not layer.training:
                across = layer.running_mean[c], layer.running_var[c]
            parts = [(0, *moments(values))] if values.numel() > 1 else []
            parts += [(1, *moments(sample))] if sample.numel() > 1 else []
            parts += [(2, *across)]
            p, q = (
                [mix[i].exp() / sum(mix[j].exp() for j, *_ in parts) for i, *_ in parts]
                for mix in (layer.mean_mix, layer.var_mix)
            )
            mean = sum(p[k] * parts[k][1] for k in range(len(parts)))
            var = sum(q[k] * parts[k][2] for k in range(len(parts)))
            y = (values - mean) / (var + layer.eps) ** 0.5
            y = y if layer.weight is None else y * layer.weight[c]
            row.append(y if layer.bias is None else y + layer.bias[c])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    size=st.integers(2, 4),
    affine=st.sampled_from(["both", "weight", "none"]),
    training=st.booleans(),
)
def test_value_and_gradients_are_those_of_the_formula(shape, size, affine, training):
    layer = layer_of(RANKS[len(shape) - 1], shape[0], affine=affine != "none")
    if affine == "weight":
        layer.register_parameter("bias", None)
    layer.train(training)
    x = batch((size, *shape)).requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = by_hand(layer, x)
    weights = batch(expected.shape, seed=2)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves, materialize_grads=True)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    found = torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 3), (3, 2, 2, 2)])
def test_gradcheck(shape):
    layer = layer_of(RANKS[len(shape) - 2], shape[1])
    names, tensors = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert set(names) == {"weight", "bias", "mean_mix", "var_mix"}
    assert torch.autograd.gradcheck(call, (batch(shape).requires_grad_(), *tensors))


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 2, 5), (4, 3, 2, 2, 2), (4, 3), (4, 3, 1, 1)])
def test_with_one_weight_at_one_it_is_that_norm(shape):
    layer = layer_of(RANKS[len(shape) - 2], 3)
    x, w, b, eps = batch(shape), layer.weight, layer.bias, layer.eps
    plain = functional.batch_norm(x, None, None, w, b, training=True, eps=eps)
    torch.testing.assert_close(set_to(layer, BATCH)(x), plain)
    torch.testing.assert_close(set_to(layer, LAYER)(x), functional.group_norm(x, 1, w, b, eps))
    if x[0, 0].numel() > 1:
        expected = functional.instance_norm(x, weight=w, bias=b, eps=eps)
        torch.testing.assert_close(set_to(layer, INSTANCE)(x), expected)


def test_without_an_instance_part_the_others_share_its_weight():
    """Even where it had all of it: what is left is shared by the two others' own weights."""
    layer = set_to(layer_of(nn.BatchNorm1d, 3, affine=False), INSTANCE)
    x = batch((5, 3))
    equal = copy.deepcopy(layer)
    nn.init.zeros_(equal.mean_mix)
    nn.init.zeros_(equal.var_mix)
    torch.testing.assert_close(layer(x), equal(x))
    assert layer(x).abs().min() > 1e-3  # not erased
    layer(x).square().sum().backward()
    assert layer.mean_mix.grad[INSTANCE] == layer.var_mix.grad[INSTANCE] == 0


@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_part_tracks_and_evaluates_as_batch_norm(momentum):
    plain = randomised(nn.BatchNorm2d(3, momentum=momentum).double())
    layer = set_to(to_switch_norm(plain).model, BATCH)
    for seed in range(3):
        x = batch((4, 3, 2, 2), seed)
        torch.testing.assert_close(layer(x), plain(x))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], value)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


def test_evaluation_mixes_in_the_running_statistics():
    layer, x = layer_of(nn.BatchNorm2d, 3).eval(), batch((4, 3, 2, 2))
    before = copy.deepcopy(layer.state_dict())
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    "rule",
    [
        create_strategy("switchnorm", statistics="pool").rule(None),
        create_strategy("switchnorm").adaptation_rule(),
    ],
)
def test_recording_keeps_the_running_statistics_and_reports_moments(rule):
    layer, x = layer_of(nn.BatchNorm2d, 3), batch((4, 3, 2, 2))
    expected, before = by_hand(layer, x), layer.read_running()
    layer.start_round(rule, RoundContext(), "site")
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer.running_mean, before.mean)
    assert torch.equal(layer.running_var, before.var)
    found = layer.report("pool").moments
    torch.testing.assert_close(found.mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(found.var, x.var((0, 2, 3), correction=0))
    assert found.count == 16


def test_calibration_reports_the_moments_of_all_its_batches():
    layer, xs = layer_of(nn.BatchNorm1d, 3), [batch((4, 3)), batch((7, 3), seed=2)]
    layer.start_round(create_strategy("switchnorm").adaptation_rule(), RoundContext(), "site")
    for x in xs:
        layer(x)
    found = layer.report("pool").moments
    torch.testing.assert_close(found.mean, torch.cat(xs).mean(0))
    torch.testing.assert_close(found.var, torch.cat(xs).var(0, correction=0))
    assert found.count == 11


def test_numerically_stable_far_from_zero():
    layer, x = layer_of(nn.BatchNorm2d, 3, affine=False).float(), batch((4, 3, 4, 4))
    wanted = layer_of(nn.BatchNorm2d, 3, affine=False)(x)
    torch.testing.assert_close(layer((x + 4096).float()).double(), wanted, rtol=0, atol=1e-3)


def test_a_batch_of_one_value_is_refused():
    with pytest.raises(ValueError, match=r"shape \(1, 3\) has one value per channel"):
        layer_of(nn.BatchNorm1d, 3)(batch((1, 3)))


def test_conversion_keeps_the_layer_and_adds_two_keys():
    model = nested_model()
    conversion = to_switch_norm(model, momentum=0.2)
    converted = conversion.model
    paths = {path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {r.path for r in conversion.replaced} == paths
    assert {(r.before, r.after) for r in conversion.replaced} == {("BatchNorm2d", "SwitchNorm2d")}
    added = {f"{path}.{name}" for path in paths for name in ("mean_mix", "var_mix")}
    saved = converted.state_dict()
    assert set(saved) == set(model.state_dict()) | added
    for key, value in model.state_dict().items():
        assert torch.equal(saved[key], value)
        assert saved[key] is not value
    for key in added:
        assert saved[key].dtype is torch.float64
        assert torch.equal(saved[key], torch.ones(3, dtype=torch.float64))
    layers = [m for m in converted.modules() if isinstance(m, SwitchableNorm)]
    assert {layer.momentum for layer in layers} == {0.2}
    assert not any(isinstance(m, SwitchableNorm) for m in model.modules())


def test_a_users_class_keeps_what_it_adds():
    class Doubled(nn.BatchNorm2d):
        def forward(self, input):  # noqa: A002
            return 2 * super().forward(input)

    model, x = nn.Sequential(Doubled(3)).double(), batch((4, 3, 2, 2))
    conversion = to_switch_norm(model)
    layer = conversion.model[0]
    assert isinstance(layer, Doubled)
    assert isinstance(layer, SwitchNorm2d)
    assert conversion.replaced[0].before == "Doubled"
    torch.testing.assert_close(layer(x), 2 * by_hand(layer, x))


def test_checkpoints_round_trip():
    one = to_switch_norm(nested_model()).model
    randomised(one, seed=4)
    two = to_switch_norm(nested_model(1)).model
    two.load_state_dict(one.state_dict(), strict=True)
    x = batch((3, 1, 8, 8))
    assert torch.equal(one.eval()(x), two.eval()(x))
    missing = two.load_state_dict(nested_model().state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert {key.rpartition(".")[2] for key in missing.missing_keys} == {"mean_mix", "var_mix"}


def test_converting_twice_changes_nothing():
    once = to_switch_norm(nested_model()).model
    randomised(once, seed=4)
    twice = to_switch_norm(once).model
    for key, value in once.state_dict().items():
        assert torch.equal(twice.state_dict()[key], value)


def test_another_strategys_layer_is_refused_by_name():
    class Other(FedBatchNorm2d):
        pass

    with pytest.raises(
        ConversionError, match=r"'0' \(Other\) comes from the conversion by another"
    ):
        to_switch_norm(nn.Sequential(Other(3)))


def test_the_strategy_sets_the_momentum():
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3))
    assert create_strategy("switchnorm").convert(model).model[0].momentum == 0.3
    assert (
        create_strategy("switchnorm", stats_momentum=None).convert(model).model[0].momentum is None
    )


def test_a_layer_without_statistics_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ConversionError, match="tracks no running statistics"):
        create_strategy("switchnorm").convert(model)


@pytest.mark.parametrize(
    ("cls", "shape"),
    [(SwitchNorm1d, (4, 3)), (SwitchNorm2d, (4, 3, 2, 2)), (SwitchNorm3d, (4, 3, 2, 2, 2))],
)
@pytest.mark.parametrize("fields", [{}, {"affine": False, "track_running_stats": False}])
def test_layers_can_be_made_directly(cls, shape, fields):
    layer = cls(3, **fields).double()
    torch.testing.assert_close(layer(batch(shape)), by_hand(layer, batch(shape)))


def test_mixing_weights_are_affine_and_shared():
    task = task_of("switchnorm", create_algorithm("dsgd"))
    kind = find_kinds(task.model)
    keys = [key for key in kind if key.endswith("_mix")]
    assert len(keys) == 12
    for key in keys:
        assert kind[key] is Kind.AFFINE
        assert task.layout.roles[key] is Role.SHARED
        assert key in task.layout.shared


class Mixing(nn.BatchNorm2d):
    """The oracle as a layer: the formula, then torch's own update of the running statistics."""

    def forward(self, x):
        y = by_hand(self, x)
        super().forward(x.detach())
        return y


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["average", "pool"])
def test_one_client_is_one_machine(statistics):
    """Plain torch with the layer above, trained on the client's batches."""
    model, clients = nested_model().train(), ToyClients(sizes=(4,))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Mixing
            module.mean_mix = nn.Parameter(torch.ones(3, dtype=torch.float64))
            module.var_mix = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for round_ in (1, 2):
        (x, y), *_ = clients.batches(0, round_).steps
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = task_of("switchnorm", create_algorithm("dsgd", lr=0.05), statistics=statistics)
    state, expected = last(task, clients, 2).state, model.state_dict()
    assert set(state.weights) == {name for name, _ in model.named_parameters()}
    for name, value in state.weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
    for path, running in state.running.items():
        torch.testing.assert_close(running.mean, expected[f"{path}.running_mean"])
        torch.testing.assert_close(running.var, expected[f"{path}.running_var"])
        assert running.num_batches == 2
