"""Counting what a model puts out leaves it as it was."""

import torch
from torch import nn

from fednorm.nn.outputs import values


def test_layers_keep_their_modes_and_hooks():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.BatchNorm1d(5)).train()
    model[1].eval()
    assert values(model, torch.ones(4, 3)) == 60
    assert [layer.training for layer in model] == [True, False, True]
    assert not any(layer._forward_hooks for layer in model)
    assert int(model[2].num_batches_tracked) == 0
