"""Products in bfloat16: weights and statistics stay in full precision, results stay near."""

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.core.moments import Moments
from fednorm.core.task import Task
from fednorm.engines.loop import rounds
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from fednorm.strategies import STRATEGIES, create_strategy
from support import ToyClients, nested_model

STEP = create_algorithm("fedavg", lr=0.05, momentum=0.9)


class Floats(ToyClients):
    def _batch(self, client, generator):
        x, y = super()._batch(client, generator)
        return x.float(), y


def trained(name, precision):
    model = nested_model().float()
    task = Task.build(model, create_strategy(name), STEP, rounds=2, precision=precision)
    *_, result = rounds(task, Floats(sizes=(6, 6), steps=2), 2)
    return task.initial_state, result.state


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_everything_that_is_kept_stays_in_full_precision(name):
    before, full = trained(name, "full")
    _, mixed = trained(name, "bf16")
    moved = distance = 0.0
    for key, value in full.weights.items():
        assert mixed.weights[key].dtype == torch.float32
        moved += float((value - before.weights[key]).square().sum())
        distance += float((value - mixed.weights[key]).square().sum())
    assert 0 < distance < 0.2**2 * moved  # products differ, the way they lead does not
    for running in mixed.running.values():
        assert running.mean.dtype == running.var.dtype == torch.float32


def test_moments_of_short_numbers_are_not_short():
    x = torch.randn(64, 3, 8, 8).bfloat16()
    got, exact = Moments.of(x), Moments.of(x.double())
    torch.testing.assert_close(got.mean, exact.mean.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.var, exact.var.float(), rtol=1e-6, atol=0)


def test_it_is_a_setting():
    values = {"strategies": ["fbn"], "rounds": 2, "seeds": 1, "clients": 3, "precision": "bf16"}
    assert run_comparison(build_experiment(values)).runs[0].status == "finished"
    with pytest.raises(ConfigError, match="needs dtype 'float32'"):
        build_experiment({**values, "dtype": "float64"})
