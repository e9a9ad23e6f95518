"""FedFN: the classifier sees features of length one, whatever the base strategy is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from support import ToyClients, last, task_of

STEP = create_algorithm("dsgd", lr=0.05)


def test_it_normalises_features_on_any_base():
    for base, options in (
        ("naive", {}),
        ("fbn", {"stats_momentum": 0.3}),
        ("fedbn", {}),
        ("gn", {}),
    ):
        wrapped = create_strategy("fedfn", base=base, options=options)
        inner = create_strategy(base, **options)
        assert wrapped.statistics == inner.statistics
        assert wrapped.roles == inner.roles
        assert wrapped.needs_batch_statistics == inner.needs_batch_statistics
        task = task_of(wrapped, STEP)
        assert set(task.layout.personal) == set(task_of(inner, STEP).layout.personal)
        last(task, ToyClients(), 2)
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5)).double().eval()
    model = create_strategy("fedfn", base="naive").convert(plain).model
    features = plain[0](x)
    expected = functional.linear(
        features / features.norm(dim=1, keepdim=True), plain[1].weight, plain[1].bias
    )
    torch.testing.assert_close(model(x), expected)


def test_its_state_is_refused_by_the_plain_model_and_says_what_to_do():
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))
    model = create_strategy("fedfn").convert(plain).model
    with pytest.raises(RuntimeError, match=r"Unexpected .* \"1\.normalizes_.*_use_fednorm_load\""):
        plain.load_state_dict(model.state_dict())
    # Clients send what they sent, and weights of the plain model are a start.
    task = task_of("fedfn", STEP, model=plain)
    assert task.layout.roles.keys() == plain.state_dict().keys()
    assert not task.initial_state.buffers
    other = (
        create_strategy("fedfn").convert(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))).model
    )
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other[1].weight, plain[1].weight)
    other.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected"):
        other.load_state_dict({**plain.state_dict(), "1.gain": torch.ones(5)})


def test_it_refuses_a_base_or_model_that_it_cannot_wrap():
    with pytest.raises(ValueError, match="not to itself"):
        create_strategy("fedfn", base="fedfn")
    with pytest.raises(ValueError, match="unknown strategy 'fnb'"):
        create_strategy("fedfn", base="fnb")
    with pytest.raises(TypeError, match="no linear layer"):
        create_strategy("fedfn").convert(nn.Sequential(nn.BatchNorm1d(3)))
