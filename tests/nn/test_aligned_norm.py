"""alignbn's layer against its formula written out."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorm import ClientState, broadcast
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import RoundContext
from fednorm.core.messages import RunningStats
from fednorm.core.round import start_round
from fednorm.core.task import load_state
from fednorm.errors import ConversionError
from strategies.aligned import TIGHT, normalize, place, scale_and_shift, spread
from support import task_of


def placed_layer(cls, shape, **fields):
    """Return a layer in the first step of a client that has trained before, its r and its s."""
    torch.manual_seed(1)
    model = spread(nn.Sequential(cls(shape[1], **fields), nn.Flatten()).double())
    task = task_of("alignbn", create_algorithm("dsgd"), model=model)
    (layer, _), draw = task.model, torch.rand(6, shape[1], dtype=torch.float64) + 0.5
    state = replace(task.initial_state, running={"0": RunningStats(draw[0], draw[1], 7)})
    parts = ("mean", "var", "measured_mean", "measured_var")
    kept = {f"0.placement.{part}": x for part, x in zip(parts, draw[2:], strict=True)}
    kept["0.placement.batches"] = torch.full_like(layer.placement.batches, 5)
    load_state(task, state, ClientState(kept))
    start_round(task, broadcast(task, state), RoundContext(step=0, samples=shape[0]))
    own = 0.9**2 * draw[2:4] + (1 - 0.9**2) * draw[4:]
    return layer, *place(own, draw[:2], layer.eps)


SHAPES = [
    (nn.BatchNorm1d, (5, 3)),
    (nn.BatchNorm1d, (2, 3, 4)),
    (nn.BatchNorm2d, (3, 2, 4, 2)),
    (nn.BatchNorm3d, (2, 2, 2, 1, 3)),
]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("cls", "shape"), SHAPES)
def test_output_and_gradients_are_those_of_the_formula(cls, shape, affine):
    layer, r, s = placed_layer(cls, shape, affine=affine, eps=1e-3)
    x = (3 * torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
    factor = torch.randn(shape, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    assert len(leaves) == (3 if affine else 1)
    y = scale_and_shift(normalize(x, layer.eps, r, s), dict(layer.named_parameters()))
    got = layer(x)
    torch.testing.assert_close(got, y, rtol=0, atol=TIGHT)
    wanted = torch.autograd.grad((y * factor).sum(), leaves)
    for one, other in zip(torch.autograd.grad((got * factor).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TIGHT)


def test_gradcheck():
    """The true gradient: r and s are constants of the round, whatever the layer saw before."""
    layer, *_ = placed_layer(nn.BatchNorm2d, (3, 2, 2, 2))
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x),
        (x, layer.weight, layer.bias),
    )


def test_a_layer_without_running_statistics_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ConversionError, match=r"'0' .* tracks no running statistics"):
        task_of("alignbn", create_algorithm("dsgd"), model=model)
