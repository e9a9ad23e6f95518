"""FedTAN on many clients equals torch's own BatchNorm on the union of their batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from fednorm.core.layer import RoundContext, Solo
from fednorm.nn.sync_norm import _Site, _Synchronized
from support import ToyClients, assert_same_state, last, nested_model, task_of

LR, ROUNDS = 0.05, 8


def central(clients, rounds=ROUNDS, model=None):
    """Plain torch: a model in training mode, plain SGD, one merged batch a round."""
    model = (model or nested_model()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for round_ in range(1, rounds + 1):
        x, y = clients.union(round_)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 7, 4), (5,)])
@pytest.mark.parametrize("shared_message", [False, True])
def test_equals_torch_on_the_union(sizes, shared_message):
    clients = ToyClients(sizes=sizes)
    task = task_of("fedtan", create_algorithm("dsgd", lr=LR), shared_message=shared_message)
    result = last(task, clients, ROUNDS)
    assert_same_state(result.state, central(clients))
    layers = len(result.state.running)
    assert layers == 6
    assert result.exchanges == (2 if shared_message else 3) * layers + 1


def test_layer_without_affine_and_layer_called_twice():
    def model():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(4, affine=False)
        layers = [nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 3)]
        return nn.Sequential(*layers).double()

    clients = ToyClients(sizes=(3, 5), shape=(4,), classes=3)
    task = task_of("fedtan", create_algorithm("dsgd", lr=LR), model=model())
    result = last(task, clients, 5)
    oracle = central(clients, 5, model())
    for name, value in result.state.weights.items():
        torch.testing.assert_close(value, oracle.state_dict()[name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_later_local_steps_are_ordinary_batch_norm():
    """With E = 2 only the first step exchanges, so the number of exchanges stays the same."""
    task = task_of("fedtan", create_algorithm("fedavg", lr=LR))
    two_steps = last(task, ToyClients(steps=2), 2)
    assert two_steps.exchanges == 3 * len(two_steps.state.running) + 1
    for running in two_steps.state.running.values():
        assert running.num_batches == 4


def test_gradient_of_the_exchange_is_right():
    """The backward formula against autograd through the explicit forward formula."""
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    place = _Site.of(RoundContext(Solo(), samples=5, examples=17), x, "site")

    def normalise(v):
        return _Synchronized.apply(v, *place.moments(v.detach(), None), 1e-5, place)

    assert torch.autograd.gradcheck(normalise, (x,))


def test_a_shared_message_survives_data_far_from_zero():
    class Far(nn.Module):
        def forward(self, x):
            return x.flatten(1) + 1e3

    model = nn.Sequential(Far(), nn.BatchNorm1d(64), nn.Linear(64, 4))

    class Single(ToyClients):
        def _batch(self, client, generator):
            x, y = super()._batch(client, generator)
            return x.float(), y

    task = task_of("fedtan", create_algorithm("dsgd", lr=LR), model=model, shared_message=True)
    assert last(task, Single(), 2).state.round == 2
