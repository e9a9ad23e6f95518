"""A Flower app of one's own: statistics are those of the samples that clients say they hold."""

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn

import fednorm.flower
from flower.federation import Nodes
from populations import Population, flat, follow, population

CLIENTS = Population(shapes=((2, 3, 3),) * 3, batch=(4, 7, 3), last=(3, 2, 3))
ROUNDS, BETA = 2, 0.1


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 4)).double()


def app():
    made = ClientApp()

    @made.train()
    def train(message, context):
        own = fednorm.flower.unpack(message, model(), context)
        round_ = message.content["config"]["server-round"]
        data = CLIENTS.batches(context.node_config["partition-id"], round_)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
        for x, y in data.steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(x), y).backward()
            optimizer.step()
        return fednorm.flower.pack(own, message, context, examples=data.examples)

    return made


@pytest.mark.parametrize("name", ["fbn", "dualbn", "naive", "feddna"])
def test_what_clients_hold_weighs(name):
    fields = {"naive": {"statistics": "pool"}, "feddna": {"strength": 0}}.get(name, {})
    chosen = fednorm.flower.NormStrategy(
        fednorm.create_strategy(name, **fields),
        model=model(),
        min_available_nodes=3,
        fraction_evaluate=0.0,
    )
    chosen.start(Nodes(app(), 3), num_rounds=ROUNDS)
    mean, var = torch.zeros(2).double(), torch.ones(2).double()
    for round_ in range(1, ROUNDS + 1):  # the layer sees the data themselves
        steps = [[flat(x) for x, _ in CLIENTS.batches(c, round_).steps] for c in range(3)]
        found = population(steps, [9 * held for held in CLIENTS.holds], BETA)
        mean, var = follow(mean, var, found, 1 - (1 - BETA) ** 3)
    got = chosen.state.running["0"]
    torch.testing.assert_close(got.mean, mean, rtol=0, atol=1e-11)
    torch.testing.assert_close(got.var, var, rtol=0, atol=1e-11)
