"""Fixup: how it starts, which branches it finds, and that it learns."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fednorm
from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.engines.merged_batch import MergedClients
from fednorm.nn.convert import ConversionError
from fednorm.strategies.fixup import ScalarAffine, find_residual_branches
from support import ToyClients, last, nested_model, task_of

CHAIN = [f"1.zzz.{number}" for number in range(5)]


def sample(count=3):
    return torch.randn(
        count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def converted(model=None):
    return create_strategy("fixup").convert(model or nested_model()).model


def he(weight):
    """The kernels of a layer, scaled to He's standard deviation by a loop over all their values."""
    total = sum(value**2 for value in weight.flatten().tolist())
    fan_in = math.prod(weight.shape[1:])
    return weight * math.sqrt(2 / fan_in) / math.sqrt(total / weight.numel())


def in_front(conv, *rest):
    """A model around a block: a stem before it and a classifier behind it."""
    tail = [nn.Flatten(), nn.Linear(4 * 8 * 8, 4)]
    return nn.Sequential(conv, *rest, *tail).double()


class Block(nn.Module):
    """Names that say nothing, and the shortcut registered after the branch."""

    def __init__(self, layers=2, shortcut=None):
        super().__init__()
        parts = [
            (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)
        ]
        self.zzz = nn.Sequential(*[m for part in parts for m in part][:-1])
        self.aaa = shortcut or nn.Identity()

    def forward(self, x):
        return self.aaa(x) + self.zzz(x)


class PreActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.c1, self.c2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.c1(self.n1(x).relu())
        y = self.c2(self.n2(y).relu())
        y += x
        return y


class Method(Block):
    def forward(self, x):
        return self.zzz(x).add(x)


class InPlace(Block):
    def forward(self, x):
        return self.zzz(x).add_(x)


class Untraceable(nn.Module):
    """Control flow on values stops torch.fx here, and only here."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.seen = None

    def forward(self, x):
        self.seen = x
        if float(x.detach().sum()) == math.pi:
            return x
        return self.body(x)


class Parallel(Block):
    """Two long ways: neither is a shortcut."""

    def __init__(self):
        super().__init__(shortcut=nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)))


class Gated(Block):
    """A branch that is multiplied by something made of itself is no plain chain."""

    def forward(self, x):
        y = self.zzz(x)
        return x + y * y.mean((2, 3), keepdim=True).sigmoid()


class Joined(Block):
    def forward(self, x):
        return torch.cat([x[:, :2], self.zzz(x)[:, 2:]], dim=1)


class Renamed(nn.Module):
    """What is called "add" is no sum."""

    def __init__(self):
        super().__init__()
        self.body, self.add, self.head = Block().zzz, nn.PairwiseDistance(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.add(x, self.body(x)))


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        parts = [nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 6)]
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return torch.add(x, self.body(x))


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(6, 2), Dense()

    def forward(self, x):
        return self.head(self.body(x))


def test_branches_start_at_zero_and_logits_too():
    model = converted()
    seen = {}
    for number, block in enumerate(model.blocks):
        block.bn2.register_forward_hook(lambda _m, _i, y, n=number: seen.__setitem__(n, y))
    assert torch.equal(model(sample()), torch.zeros(3, 4, dtype=torch.float64))
    assert set(seen) == {0, 1}
    assert not any(y.any() for y in seen.values())
    assert model.stem(sample()).abs().sum() > 0


def test_initial_weights_are_those_of_the_paper():
    plain, model = nested_model().state_dict(), converted().state_dict()
    for name in ("stem.0.weight", "blocks.1.downsample.0.weight"):
        torch.testing.assert_close(model[name], he(plain[name]))
    for name in ("blocks.0.conv1.weight", "blocks.1.conv1.weight"):
        torch.testing.assert_close(model[name], 2 ** (-1 / 2) * he(plain[name]))
    for name in ("blocks.0.conv2.weight", "blocks.1.conv2.weight", "classifier.weight"):
        assert not model[name].any()
    assert not model["classifier.bias"].any()


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_branches_of_any_depth(layers):
    torch.manual_seed(0)
    plain = in_front(nn.Conv2d(1, 4, 3, padding=1), *[Block(layers) for _ in range(3)])
    model = converted(plain)
    for block, before in zip(model[1:4], plain[1:4], strict=True):
        convs = [m for m in block.zzz if isinstance(m, nn.Conv2d)]
        old = [m for m in before.zzz if isinstance(m, nn.Conv2d)]
        for conv, was in zip(convs[:-1], old, strict=False):
            expected = 3 ** (-1 / (2 * layers - 2)) * he(was.weight)
            torch.testing.assert_close(conv.weight, expected)
            assert torch.equal(conv.bias, was.bias)
        assert not convs[-1].weight.any()
        assert not convs[-1].bias.any()


def test_scalars_stand_where_batch_norm_stood():
    conversion = create_strategy("fixup").convert(nested_model().eval())
    assert {(r.path, r.after) for r in conversion.replaced} == {
        (path, "ScalarAffine")
        for path, m in nested_model().named_modules()
        if isinstance(m, nn.BatchNorm2d)
    }
    scalars = {p: m for p, m in conversion.model.named_modules() if isinstance(m, ScalarAffine)}
    assert len(scalars) == 6
    assert {path for path, m in scalars.items() if m.scale is not None} == {
        "blocks.0.bn2",
        "blocks.1.bn2",
    }
    for module in scalars.values():
        assert not module.training
        assert module.bias.shape == (1,)
        assert module.bias.dtype is torch.float64


STEPS = {
    "sgd": {"momentum": 0.9},
    "adam": {"optimizer": "adam"},
    "dsgd": {},
    "dsgd with momentum": {"momentum": 0.9},
}
RATE, DECAY = 0.05, 0.2


def by_hand(which, clients, count):
    """The authors' way: an optimiser with groups, whose scalars have a tenth of the rate."""
    model = converted(nested_model())
    named = dict(model.named_parameters())
    scalars = [p for p in named.values() if p.shape == (1,)]
    others = [p for p in named.values() if p.shape != (1,)]
    groups = [{"params": scalars, "lr": RATE / 10}, {"params": others, "lr": RATE}]
    fields = {"lr": RATE, "weight_decay": DECAY}
    for round_ in range(1, count + 1):
        if which == "adam":
            optimizer = torch.optim.Adam(groups, **fields)
        elif which == "sgd" or round_ == 1:
            momentum = 0.9 if "momentum" in STEPS[which] else 0.0
            dampening = momentum if "dsgd" in which else 0.0
            optimizer = torch.optim.SGD(groups, momentum=momentum, dampening=dampening, **fields)
            if dampening:  # as from a momentum of zero, and not from the first gradient
                for p in named.values():
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for x, y in clients.batches(0, round_).steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: p.detach() for name, p in named.items()}


def fixup_task(which):
    name = "dsgd" if "dsgd" in which else "fedavg"
    return task_of("fixup", create_algorithm(name, lr=RATE, weight_decay=DECAY, **STEPS[which]))


@pytest.mark.parametrize("which", sorted(STEPS))
def test_scalars_learn_and_decay_at_a_tenth_of_the_rate(which):
    clients = ToyClients(sizes=(5,), steps=1 if "dsgd" in which else 2)
    ours = last(fixup_task(which), clients, 4).state.weights
    expected = by_hand(which, clients, 4)
    assert ours.keys() == expected.keys()
    moved = [n for n, p in expected.items() if p.shape == (1,) and float(p) not in (0.0, 1.0)]
    assert len(moved) == 8  # 6 biases, 2 multipliers
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


def test_weight_decay_alone_shrinks_a_multiplier_by_a_tenth_of_the_rate():
    """With gradients of zero a scalar shrinks by the factor 1 - rate/10·decay."""
    for which in ("sgd", "dsgd"):
        task = fixup_task(which)
        task = replace(task, loss=lambda output, _: 0 * output.sum())
        clients = ToyClients(sizes=(3, 5, 4))
        state = last(task, clients, 1).state
        for name, value in state.weights.items():
            before = task.initial_state.weights[name]
            rate = RATE / 10 if value.shape == (1,) else RATE
            torch.testing.assert_close(value, before * (1 - rate * DECAY), rtol=1e-12, atol=0)


def test_scalars_start_as_what_they_are():
    for module in converted().modules():
        if isinstance(module, ScalarAffine):
            assert module.bias.item() == 0.0
            assert module.scale is None or module.scale.item() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dsgd", "fedavg"])
def test_engines_agree_on_the_rates(kind):
    """As users run it: float32, the engine that is chosen, against client after client."""
    settings = {
        "model": "resnet",
        "clients": 3,
        "partition": "dirichlet_unbalanced=0.5",
        "algorithm": {"name": kind, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        "local_steps": 1 if kind == "dsgd" else 2,
        "rounds": 3,
        "seeds": 1,
    }
    loop, auto = (
        fednorm.compare(["fixup"], **settings, engine=engine).runs[0].final
        for engine in ("loop", "auto")
    )
    assert auto.loss == pytest.approx(loop.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Block(), CHAIN),
        (Block(shortcut=nn.Conv2d(4, 4, 1)), CHAIN),
        (Method(), CHAIN),
        (InPlace(), CHAIN),
        (PreActivation(), ["1.n1", "1.c1", "1.n2", "1.c2"]),
        (Untraceable(PreActivation()), ["1.body.n1", "1.body.c1", "1.body.n2", "1.body.c2"]),
        (nn.Sequential(PreActivation()), ["1.0.n1", "1.0.c1", "1.0.n2", "1.0.c2"]),
    ],
)
def test_finds_branches_whatever_their_names(block, expected):
    model = in_front(nn.Conv2d(1, 4, 3, padding=1), block)
    result = converted(model)
    assert find_residual_branches(result) == [expected]
    assert not result(sample()).any()
    inside = [m for m in result[1].modules() if isinstance(m, ScalarAffine)]
    assert [m.scale is not None for m in inside] == [False, True]
    seen = []
    hook = result.get_submodule(expected[-1]).register_forward_hook
    hook(lambda _m, _i, y: seen.append(y.clone()))
    result(sample())
    assert not seen[0].any()


def test_tracing_leaves_no_trace():
    model = converted(in_front(nn.Conv2d(1, 4, 3, padding=1), Untraceable(Block())))
    assert model[1].seen is None
    copy.deepcopy(model)


def test_a_block_that_is_used_twice_is_scaled_once():
    torch.manual_seed(0)
    block = Block()
    plain = in_front(nn.Conv2d(1, 4, 3, padding=1), block, block)
    model = converted(plain)
    expected = 2 ** (-1 / 2) * he(plain[1].zzz[0].weight)
    torch.testing.assert_close(model[1].zzz[0].weight, expected)


@pytest.mark.parametrize("block", [Parallel(), Gated(), Joined(), Block(layers=1)])
def test_what_is_no_residual_branch_is_refused(block):
    model = in_front(nn.Conv2d(1, 4, 3, padding=1), block)
    with pytest.raises(
        ConversionError, match="Fixup needs residual branches, but none was found in Sequential"
    ):
        converted(model)


def test_a_module_called_add_is_no_sum():
    with pytest.raises(ConversionError, match="none was found in Renamed"):
        converted(Renamed())


def test_a_model_without_a_linear_classifier_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Block(), nn.Conv2d(4, 4, 8), nn.Flatten())
    with pytest.raises(ConversionError, match="Fixup needs a linear classifier, but Sequential"):
        converted(model)


def test_a_residual_network_of_linear_layers():
    model = converted(nn.Sequential(nn.Linear(3, 6), Dense(), Dense(), nn.Linear(6, 2)).double())
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(model[:3](x), model[0](x))
    assert not model(x).any()
    assert model[1].body[1].bias.dtype is torch.float64


def test_the_classifier_is_outside_the_branches():
    model = converted(HeadFirst().double())
    assert not model(torch.randn(5, 6, dtype=torch.float64)).any()
    assert model.body.body[0].weight.any()


def test_a_layer_of_zeros_stays_one():
    plain = nested_model()
    nn.init.zeros_(plain.stem[0].weight)
    assert not converted(plain).stem[0].weight.any()


def test_the_given_model_stays_as_it_is():
    model = nested_model()
    before = copy.deepcopy(model.state_dict())
    converted(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_federated_equals_one_machine():
    clients, step = ToyClients(sizes=(2, 7, 1)), create_algorithm("dsgd", lr=0.05)
    federated, central = (
        last(task_of("fixup", step), c).state for c in (clients, MergedClients(clients))
    )
    for name, value in federated.weights.items():
        torch.testing.assert_close(value, central.weights[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_network_that_starts_at_zero_learns():
    result = fednorm.simulate(
        "fixup",
        model="resnet",
        data="digits",
        partition="iid",
        clients=2,
        local_steps=5,
        rounds=45,
        eval_every=15,
        algorithm={"name": "fedavg", "lr": 0.4, "momentum": 0.9},
    )
    assert result.status == "finished"
    assert result.history[0].train_loss < math.log(10)
    assert result.final.train_loss < 1.5
    assert result.final.accuracy > 0.4
