"""Products in bfloat16 leave statistics alone: where layers see the same, they report the same.

The samples are numbers that bfloat16 has, and the convolution passes them on as they are. So layers
see the same values in both precisions, and float64 tells what they should have made of them.
"""

from dataclasses import fields as fields_of

import pytest
import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.core.task import Task
from fednorm.engines import loop, merged_batch, stacked
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.strategies import STRATEGIES, create_strategy
from support import ToyClients

WITHOUT = {"gn", "ln", "in", "none", "gn_ws", "fixup", "fedwon"}  # no statistics
MERGEABLE = sorted(
    name for name in set(STRATEGIES) - WITHOUT if create_strategy(name).mergeable_batches
)
SETTINGS = {
    "stats_momentum": 1.0,  # statistics are those of the round
    "backward_momentum": 1.0,
    "weight_standardization": False,  # the convolution stays as it is
    "freeze_round": 1.0,
    "options": {"stats_momentum": 1.0},  # fedfn's, for its base
}


class Far(ToyClients):
    """Mean 10 and deviation 1: digits that bfloat16's eight bits do not have."""

    dtype = torch.float32

    def _batch(self, client, generator):
        x = torch.randn(self.sizes[client], *self.shape, generator=generator) + 10
        y = torch.randint(self.classes, (len(x),), generator=generator)
        return x.bfloat16().to(self.dtype), y


class FarDouble(Far):
    dtype = torch.float64


class Probe(nn.Module):
    """Passes on what it gets, and remembers it."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        if self.training:
            self.store.append(x.detach().double())
        return x


def model(store):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), Probe(store), nn.Flatten()]
    made = nn.Sequential(*layers, nn.Linear(128, 4))
    with torch.no_grad():
        made[0].weight.copy_(torch.eye(2)[:, :, None, None])
        made[1].weight.fill_(0.73)  # so that rounding what comes out favours neither side
    return made


def run(name, precision, kind, engine=loop.rounds, sizes=(48, 64)):
    """Return all statistics after a round, and what came out of the layer."""
    store = []
    known = {f.name for f in fields_of(STRATEGIES[name])}
    chosen = create_strategy(name, **{k: v for k, v in SETTINGS.items() if k in known})
    made = model(store).double() if precision == "full" else model(store)
    toy = FarDouble if precision == "full" else Far
    clients = toy(sizes=sizes, shape=(2, 8, 8))
    task = Task.build(made, chosen, create_algorithm(kind, lr=1e-3), rounds=2, precision=precision)
    *_, result = engine(task, clients, 1)
    outputs = [x.clone() for x in store]
    state = calibrate_for_test(task, result.state, result.client_states, clients)
    found = {}
    for when, running in (("trained", result.state.running), ("tested", state.running)):
        for path, own in running.items():
            found |= {f"{when} {path} mean": own.mean, f"{when} {path} variance": own.var}
    for client, client_state in result.client_states.items():
        statistics = {k: v for k, v in client_state.tensors.items() if "running_" in k}
        found |= {f"{client} {k}": v for k, v in statistics.items()}
    return {k: v for k, v in found.items() if v.numel()}, outputs


def assert_near(found, truth):
    assert found.keys() == truth.keys()
    for key, value in found.items():
        assert value.dtype == torch.float32, key
        if "backward_means" in key:  # of gradients, which are bfloat16's; see below for the rest
            continue
        torch.testing.assert_close(value.double(), truth[key], rtol=1e-5, atol=1e-5, msg=key)


def assert_rounded_once(outputs, expected):
    """What comes out is rounded to bfloat16, once; the statistics it was made with are not."""
    assert len(outputs) == len(expected) > 0
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
        assert float((ours - theirs).mean().abs()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedavg", "dsgd"])
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - WITHOUT))
def test_statistics_at_mean_10(name, kind):
    """Within 0.001 of the truth was asked for; float32 gives 0.00001."""
    found, outputs = run(name, "bf16", kind)
    truth, expected = run(name, "full", kind)
    assert found
    assert_near(found, truth)
    means = [v for k, v in truth.items() if k.endswith("mean") and "backward" not in k]
    assert any((m - 10).abs().max() < 0.1 for m in means)
    assert_rounded_once(outputs, expected)


def run_stacked(task, clients, count):
    return loop.rounds(task, clients, count, train=stacked.StackedTrainer(task, 2).train)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(48, 64), (56, 56)])
@pytest.mark.parametrize("name", MERGEABLE)
def test_statistics_at_mean_10_in_the_merged_batch(name, sizes):
    found, outputs = run(name, "bf16", "dsgd", merged_batch.rounds, sizes)
    truth, expected = run(name, "full", "dsgd", merged_batch.rounds, sizes)
    assert_near(found, truth)
    assert_rounded_once(outputs, expected)


@pytest.mark.parametrize(
    "name", ["naive", "fbn", "dualbn", "feddna", "fedbn", "hbn", "alignbn", "brn"]
)
def test_statistics_at_mean_10_with_stacked_clients(name):
    found, _ = run(name, "bf16", "fedavg", run_stacked, (56, 56))
    truth, _ = run(name, "full", "fedavg", run_stacked, (56, 56))
    assert_near(found, truth)
