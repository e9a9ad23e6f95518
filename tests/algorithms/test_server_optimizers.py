"""The server's optimizers against Flower's own classes, and what must not pass through them."""

from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.algorithms.fedavg import GroupedSGD
from fednorm.core.messages import Reply
from fednorm.core.round import broadcast, server_round
from fednorm.core.types import Tensors
from fednorm.engines.loop import rounds
from support import ToyClients, last, task_of

RATE, BETA1, BETA2, TAU, EXAMPLES = 0.07, 0.8, 0.95, 0.01, (3, 5)
ADAPTIVE = {"eta": RATE, "tau": TAU}
FLOWER = {
    "sgd": flower.FedAvgM(server_learning_rate=RATE, server_momentum=BETA1),
    "adam": flower.FedAdam(**ADAPTIVE, beta_1=BETA1, beta_2=BETA2),
    "yogi": flower.FedYogi(**ADAPTIVE, beta_1=BETA1, beta_2=BETA2),
    "adagrad": flower.FedAdagrad(**ADAPTIVE),
}


def draw_updates(round_: int, like: Tensors):
    generator = torch.Generator().manual_seed(round_)
    return [
        {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in like.items()}
        for _ in EXAMPLES
    ]


def step_of_flower(strategy, round_, weights, updates):
    """Return the weights after a round of one of Flower's strategies."""
    record = ArrayRecord(weights)
    plain = isinstance(strategy, flower.FedAvgM)
    strategy.current_arrays = record if plain else {n: a.numpy() for n, a in record.items()}
    if getattr(strategy, "v_t", ()) is None:  # 0; the paper's is τ²
        strategy.v_t = {n: torch.full_like(t, TAU**2).numpy() for n, t in weights.items()}
    if isinstance(strategy, flower.FedAdam):  # corrects a bias, which the paper's does not
        seen = round_ + 1.0
        strategy.eta = RATE * (1 - BETA1**seen) / (1 - BETA2**seen) ** 0.5
    replies = []
    for update, examples in zip(updates, EXAMPLES, strict=True):
        new = {n: weights[n] + change for n, change in update.items()}
        metrics = MetricRecord({"num-examples": examples})
        content = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        replies.append(SimpleNamespace(content=content, has_error=lambda: False))
    arrays, _ = strategy.aggregate_train(round_, replies)
    return {n: torch.from_numpy(array.numpy()) for n, array in arrays.items()}


@pytest.mark.parametrize("rule", FLOWER)
def test_weights_are_those_of_flowers_strategy(rule):
    torch.manual_seed(0)
    momentum = 0.0 if rule == "adagrad" else BETA1
    algorithm = create_algorithm(
        "fedavg", server=rule, server_lr=RATE, server_momentum=momentum, server_beta2=BETA2,
        server_tau=TAU,
    )  # fmt: skip
    task = task_of("none", algorithm, model=nn.Linear(3, 2).double())
    state = task.initial_state
    weights = dict(state.weights)
    for round_ in range(1, 6):
        updates = draw_updates(round_, weights)
        pairs = enumerate(zip(updates, EXAMPLES, strict=True))
        replies = [Reply(i, examples, update, {}, {}) for i, (update, examples) in pairs]
        state = server_round(task, state, replies)
        weights = step_of_flower(FLOWER[rule], round_, weights, updates)
        for name, value in weights.items():
            torch.testing.assert_close(state.weights[name], value, rtol=0, atol=1e-12)
    assert not broadcast(task, state).state.optimizer  # it stays at the server


@pytest.mark.parametrize("local", ["fedavg", "dsgd"])
@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad", "sgd"])
def test_statistics_and_counters_do_not_pass_through(rule, local):
    plain, ours = (
        next(rounds(task_of("naive", create_algorithm(local, **fields)), ToyClients(), 1)).state
        for fields in ({}, {"server": rule, "server_lr": 0.5})
    )
    for path, running in plain.running.items():
        assert torch.equal(running.mean, ours.running[path].mean)
        assert torch.equal(running.var, ours.running[path].var)
        assert running.num_batches == ours.running[path].num_batches
    assert all(not torch.equal(t, ours.weights[n]) for n, t in plain.weights.items())
    assert set().union(*ours.optimizer.values()) <= set(plain.weights)


def test_a_gradient_step_is_the_change_that_passes_through():
    """With dsgd the server's momentum of 0.9 is torch's, as its learning rate is constant."""
    clients = ToyClients(sizes=(4, 4))
    task = task_of("ln", create_algorithm("dsgd", lr=0.05, server_momentum=0.9))
    state = last(task, clients, 4).state
    model = task_of("ln", create_algorithm("dsgd")).model.train()
    optimizer = GroupedSGD([{"params": list(model.parameters()), "lr": 0.05}], 0.9, 0.0)
    for round_ in range(1, 5):
        optimizer.zero_grad()
        x, y = clients.union(round_)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.weights[name], value.detach(), rtol=0, atol=1e-12)


def test_a_parameter_that_rests_keeps_what_the_server_kept():
    task = task_of("fixbn", create_algorithm("fedavg", server="adam"), freeze_round=1,
                   freeze_affine=True)  # fmt: skip
    first, second = rounds(task, ToyClients(), 2)
    resting = set(first.state.weights) - set(second.replies[0].update)
    assert resting
    for name in resting:
        assert torch.equal(first.state.weights[name], second.state.weights[name])
        kept = (s.state.optimizer["squares"][name] for s in (first, second))
        assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"server": "lamb"}, "server must be one of 'sgd', 'adam', 'yogi', 'adagrad'"),
        ({"server_lr": 0.0}, "server_lr must be positive"),
        ({"server_momentum": 1.0}, "server_momentum must be in"),
        ({"server": "adam", "server_beta2": 1.0}, "server_beta2 must be in"),
        ({"server": "adam", "server_tau": 0.0}, "server_tau must be positive"),
    ],
)
def test_refuses_impossible_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        create_algorithm("fedavg", **fields)
