"""Every server strategy of Flower inside NormStrategy does to the weights what it does by itself.

In float32, with unequal nodes and local epochs. A strategy that a new Flower brings fails here
until it is decided on.
"""

import inspect
import random

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import nn

import fednorm.flower
from fednorm.errors import ConfigError
from flower.federation import Nodes

NODES, ROUNDS, RATE, EPOCHS = 7, 3, 0.05, 2
OF_TREES = {"FedXgbBagging", "FedXgbCyclic"}
FIELDS = {
    "FedAvgM": {"server_learning_rate": 0.7, "server_momentum": 0.9},
    "FedAdagrad": {"eta": 0.01},
    "FedAdam": {"eta": 0.01},
    "FedYogi": {"eta": 0.01},
    "FedTrimmedAvg": {"beta": 0.2},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "Bulyan": {"num_malicious_nodes": 1},
    "FedProx": {"proximal_mu": 0.1},
    "QFedAvg": {"client_learning_rate": RATE, "q": 0.2},
}
PRIVATE = {
    "DifferentialPrivacyServerSideFixedClipping": {"noise_multiplier": 0.1, "clipping_norm": 0.5},
    "DifferentialPrivacyClientSideFixedClipping": {"noise_multiplier": 0.1, "clipping_norm": 0.5},
    "DifferentialPrivacyServerSideAdaptiveClipping": {"noise_multiplier": 0.1},
    "DifferentialPrivacyClientSideAdaptiveClipping": {"noise_multiplier": 0.1},
}
MODS = {
    "DifferentialPrivacyClientSideFixedClipping": fixedclipping_mod,
    "DifferentialPrivacyClientSideAdaptiveClipping": adaptiveclipping_mod,
}
ALL = sorted(
    name
    for name, found in vars(flower).items()
    if inspect.isclass(found) and issubclass(found, Strategy) and not inspect.isabstract(found)
)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Flower's QFedAvg and Bulyan collect garbage for each reply, which takes nearly all time."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


class Net(nn.Sequential):
    """Convolution, BatchNorm, ReLU, as ordinary networks have them."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64, 3)),
        )


def data(node):
    generator = torch.Generator().manual_seed(node)
    size = 4 + 2 * node
    x = torch.randn(size, 1, 6, 6, generator=generator) * (1 + 0.2 * node) + 0.3 * node
    return x, torch.randint(3, (size,), generator=generator)


def fit(model, message, node):
    """Train as FedProx asks clients to; others send no mu."""
    mu = message.content["config"].get("proximal-mu", 0.0)
    received = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model.train()
    x, y = data(node)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        near = sum(
            (p - r).square().sum() for p, r in zip(model.parameters(), received, strict=True)
        )
        loss = nn.functional.cross_entropy(model(x), y)
        (loss + mu / 2 * near).backward()
        optimizer.step()
    return {"train_loss": loss.item()}, len(y)


def with_fednorm(mods=()):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        model = fednorm.flower.unpack(message, Net(), context)
        metrics, examples = fit(model, message, context.node_config["partition-id"])
        return fednorm.flower.pack(model, message, context, examples=examples, metrics=metrics)

    @app.evaluate()
    def evaluate(message, context):
        model, (x, y) = Net(), data(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = nn.functional.cross_entropy(model.eval()(x), y).item()
        metrics = MetricRecord({"eval_loss": loss, "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def without(mods=()):
    """Make the oracle: Flower alone; weights travel, nothing else. Statistics are not needed."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        metrics, examples = fit(model, message, context.node_config["partition-id"])
        weights = ArrayRecord({k: p.detach() for k, p in model.named_parameters()})
        record = MetricRecord({**metrics, "num-examples": examples})
        return Message(RecordDict({"arrays": weights, "metrics": record}), reply_to=message)

    return app


def make(name, **more):
    settings = {"min_available_nodes": NODES, "fraction_evaluate": 0.0} | more
    if name in PRIVATE:
        inner = FedAvg(**settings)
        return getattr(flower, name)(inner, num_sampled_clients=NODES, **PRIVATE[name])
    return getattr(flower, name)(**FIELDS.get(name, {}), **settings)


def start(chosen, app, *initial):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (Flower draws its noise from it)
    return chosen.start(Nodes(app, NODES), *initial, num_rounds=ROUNDS)


@pytest.mark.parametrize("name", [name for name in ALL if name not in OF_TREES])
def test_weights_are_those_of_the_server_strategy_by_itself(name):
    torch.manual_seed(0)
    net = Net()
    weights = ArrayRecord({k: p.detach() for k, p in net.named_parameters()})
    alone = start(make(name), without([MODS[name]] if name in MODS else []), weights)
    ours = fednorm.flower.NormStrategy("naive", model=net, server=make(name))
    mods = [fednorm.flower.weights_only(MODS[name])] if name in MODS else []
    result = start(ours, with_fednorm(mods))
    assert ours.state.round == ROUNDS
    for key, expected in alone.arrays.to_torch_state_dict().items():
        found = ours.state.weights[key]
        assert found.dtype == torch.float32
        assert (found - net.state_dict()[key]).abs().max() > 1e-3  # it learnt
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    arrays = result.arrays.to_torch_state_dict()
    Net().load_state_dict(arrays, strict=True)
    assert (arrays["1.running_var"] > 0).all()
    assert result.train_metrics_clientapp[ROUNDS].keys() >= {"train_loss"}


@pytest.mark.parametrize("name", sorted(OF_TREES))
def test_strategies_of_trees_are_refused_by_name(name):
    trees = getattr(flower, name)()
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(trees, 0.1, 0.5, NODES)
    for server in (trees, wrapped):
        with pytest.raises(ConfigError, match=f"{name} combines trees"):
            fednorm.flower.NormStrategy("naive", model=Net(), server=server)


def test_a_legacy_strategy_is_refused_by_name():
    with pytest.raises(ConfigError, match="legacy strategies are not supported"):
        fednorm.flower.NormStrategy("naive", model=Net(), server=legacy.FedAvg())


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_a_wrapper_around_it_is_refused_before_the_first_message(name):
    inner = fednorm.flower.NormStrategy("naive", model=Net(), min_available_nodes=NODES)
    around = getattr(flower, name)(inner, num_sampled_clients=NODES, **PRIVATE[name])
    grid = Nodes(with_fednorm(), NODES)
    with pytest.raises(ConfigError, match=r"put it inside: NormStrategy\(\.\.\., server=Wrapper"):
        around.start(grid, ArrayRecord(Net().state_dict()), num_rounds=1)
    assert not grid.sent


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(0.5, 0, 1, 1)])
def test_mods_for_privacy_see_weights_only_and_evaluations_pass_by(mod):
    side = "Adaptive" if mod is adaptiveclipping_mod else "Fixed"
    server = make(f"DifferentialPrivacyClientSide{side}Clipping", fraction_evaluate=1.0)
    ours = fednorm.flower.NormStrategy("fbn", model=Net(), server=server)
    result = start(ours, with_fednorm([fednorm.flower.weights_only(mod)]))
    assert ours.state.running["1"].num_batches == ROUNDS * EPOCHS  # statistics are not clipped
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]


def test_a_mod_that_is_not_wrapped_is_told():
    server = make("DifferentialPrivacyClientSideFixedClipping")
    ours = fednorm.flower.NormStrategy("fbn", model=Net(), server=server)
    with pytest.raises(ConfigError, match=r"mods=\[fednorm.flower.weights_only\(mod\)\]"):
        start(ours, with_fednorm([fixedclipping_mod]))


def test_one_precision_of_the_server_is_not_another_model():
    """FedAdam computes in float64; what it sends is the model's float32."""
    ours = fednorm.flower.NormStrategy("fbn", model=Net(), server=make("FedAdam"))
    result = start(ours, with_fednorm())
    kinds = {key: array.dtype for key, array in result.arrays.items()}
    assert kinds.pop("1.num_batches_tracked") == "int64"
    assert set(kinds.values()) == {"float32"}
