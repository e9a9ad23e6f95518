"""Activations that work in place right behind a converted layer: no error, and the same values."""

import pytest
import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.strategies import STRATEGIES
from support import ToyClients, last, task_of


class Block(nn.Module):
    """A residual branch in the three orders that are in use."""

    def __init__(self, order, norm, relu):
        super().__init__()
        self.order, self.relu = order, relu
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), norm()
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), norm()

    def forward(self, x):
        if self.order == "before":  # x is needed again: whoever passes it on must not be x
            return x + self.conv2(self.relu(self.bn2(self.conv1(self.relu(self.bn1(x))))))
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.order == "after":
            return self.relu(x + out)
        out += x
        return self.relu(out)


def affine():
    return nn.BatchNorm2d(4)


def bare():
    return nn.BatchNorm2d(4, affine=False)


def without_beta():
    norm = nn.BatchNorm2d(4)
    norm.bias = None
    return norm


def model_of(order, norm, *, inplace):
    torch.manual_seed(0)
    block = Block(order, norm, nn.ReLU(inplace))
    stem = (nn.Conv2d(1, 4, 3), norm(), nn.ReLU(inplace))
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    return nn.Sequential(*stem, block, *tail).double()


@pytest.mark.slow
@pytest.mark.parametrize("norm", [affine, bare, without_beta])
@pytest.mark.parametrize("order", ["before", "after", "after, in place"])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_training_is_the_same_in_place(name, order, norm):
    states = []
    for inplace in (False, True):
        model = model_of(order, norm, inplace=inplace)
        task = task_of(name, create_algorithm("dsgd", lr=0.1), model=model)
        states.append(last(task, ToyClients(sizes=(4, 3)), 2).state)
    expected, given = states
    for key, value in expected.weights.items():
        assert torch.equal(given.weights[key], value), key
    for path, running in expected.running.items():
        assert torch.equal(given.running[path].mean, running.mean), path
    assert any(not torch.equal(v, task.initial_state.weights[k]) for k, v in given.weights.items())
