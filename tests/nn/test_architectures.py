"""Every strategy on the networks that people bring, each trained for a round by two clients.

The deepest networks run strategies of each kind of conversion; others differ by a rule alone.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm import Batches, ClientState, broadcast, client_round, create_strategy, server_round
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import NormLayer
from fednorm.core.task import Task, export
from fednorm.core.types import Kind, Role
from fednorm.nn.convert import ConversionError
from fednorm.strategies import STRATEGIES
from nn.architectures import ARCHITECTURES, CLASSES

networks = pytest.mark.parametrize("network", ARCHITECTURES)
every = pytest.mark.parametrize("name", sorted(STRATEGIES))
# These work on any network with BatchNorm; others may refuse some, for a reason.
KEEP_BN = ("naive", "fixbn", "fbn", "fedtan", "fedbn", "silobn")
REPLACE_BN = ("gn", "ln", "in", "none")
DEEPEST = ("densenet121", "efficientnet_b0")
KINDS = ("naive", "fbn", "silobn", "dualbn", "switchnorm", "gn", "fedwon")


@functools.cache
def small(network):
    torch.manual_seed(0)
    return ARCHITECTURES[network].small()


def batch_norms(model):
    """Return the paths of BatchNorm layers, by torch alone."""
    return [path for path, m in model.named_modules() if isinstance(m, _BatchNorm)]


def batches(architecture, client):
    generator = torch.Generator().manual_seed(client)
    size = 2 + client
    x = torch.randn(size, *architecture.shape, generator=generator) * (1 + client) + client
    pixels = architecture.shape[1:] if architecture.dense else ()
    y = torch.randint(CLASSES, (size, *pixels), generator=generator)
    return Batches(client, [(x, y)], size, seed=client)


def converted(name, model):
    """Make a task, or return None: a strategy may refuse the model, if it says why."""
    chosen = create_strategy(name)
    if name not in (*KEEP_BN, *REPLACE_BN):
        try:
            chosen.convert(model)
        except (ConversionError, ValueError) as error:
            assert_names_the_reason(str(error), model)
            return None
    return Task.build(model, chosen, create_algorithm("dsgd", lr=0.01), rounds=4)


def assert_names_the_reason(said, model):
    paths = [f"layer {path!r}" for path, _ in model.named_modules()]
    assert any(named in said for named in (type(model).__name__, *paths)), said
    assert said.endswith(".")


@pytest.fixture
def untouched():
    """Return a network's model, and see to it that the test leaves it as it was."""
    lent = []

    def lend(network):
        model = small(network)
        types = [type(m) for m in model.modules()]
        lent.append((model, types, copy.deepcopy(model.state_dict())))
        return model

    yield lend
    for model, types, tensors in lent:
        assert [type(m) for m in model.modules()] == types
        assert all(torch.equal(value, tensors[key]) for key, value in model.state_dict().items())


@networks
def test_is_built_like_the_original(network):
    architecture = ARCHITECTURES[network]
    with torch.device("meta"):
        model = architecture.full()
    if architecture.parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == architecture.parameters
    assert list(small(network).state_dict()) == list(model.state_dict())
    assert len(batch_norms(model)) == architecture.norms


def test_three_of_the_layers_of_resnet18_have_no_bn_in_their_names():
    paths = batch_norms(small("resnet18"))
    assert [path for path in paths if "bn" not in path] == [
        f"layer{i}.0.downsample.1" for i in (2, 3, 4)
    ]


CASES = [
    (network, name)
    for network, architecture in ARCHITECTURES.items()
    for name in (KINDS if network in DEEPEST else sorted(STRATEGIES))
    if architecture.norms
]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "name"), CASES)
def test_runs_a_round_and_comes_back(network, name, untouched):
    plain, architecture = untouched(network), ARCHITECTURES[network]
    if (task := converted(name, plain)) is not None:
        assert_covered(task, batch_norms(plain))
        state, client_state = one_round(task, architecture)
        assert_checkpoint_moves(name, export(task, state, client_state), task, plain, architecture)


def assert_covered(task, paths):
    """Every BatchNorm layer was replaced, and none of torch's own is left."""
    replaced = [r.path for r in task.replaced]
    assert len(set(replaced)) == len(replaced)
    assert set(paths) <= set(replaced)
    left = [m for m in task.model.modules() if isinstance(m, _BatchNorm)]
    assert all(isinstance(m, NormLayer) for m in left)
    if left:
        assert len(left) == len(paths)
    if task.strategy.role(nn.BatchNorm1d(1), Kind.STATISTIC) is Role.STATISTIC and left:
        assert set(paths) <= set(task.initial_state.running)


def one_round(task, architecture):
    received = broadcast(task, task.initial_state)
    results = [
        client_round(task, received, ClientState(), batches(architecture, c)) for c in (0, 1)
    ]
    state = server_round(task, task.initial_state, [reply for reply, _ in results])
    assert not state.rejected
    tensors = (*state.weights.values(), *state.buffers.values())
    assert all(torch.isfinite(t).all() for t in tensors if t.is_floating_point())
    moved = [not torch.equal(v, state.weights[k]) for k, v in task.initial_state.weights.items()]
    assert any(moved)
    return state, results[0][1]


def assert_checkpoint_moves(name, model, task, plain, architecture):
    """A strategy that keeps BatchNorm gives torch's own checkpoint; others give one to itself."""
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    counters = [int(value) for key, value in saved.items() if "num_batches_tracked" in key]
    if name in KEEP_BN:
        assert list(saved) == list(plain.state_dict())
        assert counters == [1] * architecture.norms
    if saved.keys() == plain.state_dict().keys():
        other = copy.deepcopy(plain)
    else:
        other = task.strategy.convert(plain).model
    other.load_state_dict(saved, strict=True)
    assert all(torch.equal(value, saved[key]) for key, value in other.state_dict().items())
    if name in (*KEEP_BN, *REPLACE_BN):
        x = batches(architecture, 0).steps[0][0]
        with torch.no_grad():
            assert torch.equal(other.eval()(x), model(x))


@pytest.mark.slow
@every
def test_a_transformer_has_nothing_to_convert_and_that_is_said(name, untouched):
    plain = untouched("transformer")
    if name in {"none", "naive", "fedbn", "fedfn"}:
        task = converted(name, plain)
        assert bool(task.layout.personal) == (name == "fedbn")
        one_round(task, ARCHITECTURES["transformer"])
        return
    with pytest.raises(
        ValueError, match=r"needs BatchNorm layers, but Transformer has none; choose"
    ):
        create_strategy(name).convert(plain)


REAL = [n for n, a in ARCHITECTURES.items() if a.torchvision]


@pytest.mark.parametrize("network", REAL)
def test_torchvision_has_the_same_structure(network):
    models = pytest.importorskip("torchvision.models", reason="needs torchvision's own networks")
    architecture = ARCHITECTURES[network]
    build = functools.reduce(getattr, architecture.torchvision.split("."), models)
    with torch.device("meta"):
        real, ours = build(weights=None).state_dict(), architecture.full().state_dict()
    assert {k: v.shape for k, v in real.items()} == {k: v.shape for k, v in ours.items()}


@pytest.mark.parametrize("name", ["fbn", "gn"])
@pytest.mark.parametrize("network", REAL)
def test_runs_a_round_of_torchvisions_own(network, name):
    models = pytest.importorskip("torchvision.models", reason="needs torchvision's own networks")
    architecture = ARCHITECTURES[network]
    build = functools.reduce(getattr, architecture.torchvision.split("."), models)
    plain = build(weights=None, num_classes=CLASSES)
    task = converted(name, plain)
    assert_covered(task, batch_norms(plain))
    state, client_state = one_round(task, architecture)
    assert_checkpoint_moves(name, export(task, state, client_state), task, plain, architecture)


@pytest.mark.parametrize("name", ["fbn", "fedtan", "gn", "none"])
@pytest.mark.parametrize("network", ["resnetv2_50", "efficientnet_b0", "regnety_002"])
def test_runs_a_round_of_timms_networks_with_activations_inside_norms(network, name):
    timm = pytest.importorskip("timm", reason="needs timm's layers that normalise and activate")
    plain = timm.create_model(network, num_classes=CLASSES)
    assert any(isinstance(m, timm.layers.BatchNormAct2d) for m in plain.modules())
    task = converted(name, plain)
    assert_covered(task, batch_norms(plain))
    one_round(task, ARCHITECTURES["resnet50"])


def test_torchvisions_frozen_layers_are_kept_and_reported():
    ops = pytest.importorskip("torchvision.ops", reason="needs torchvision's FrozenBatchNorm2d")
    model = nn.Sequential(nn.Conv2d(3, 2, 1), ops.FrozenBatchNorm2d(2), nn.BatchNorm2d(2))
    conversion = create_strategy("fbn").convert(model)
    assert [(k.path, k.type) for k in conversion.skipped] == [("1", "FrozenBatchNorm2d")]
