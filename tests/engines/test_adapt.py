"""Per-client adaptation at evaluation, and clients that never trained."""

import pytest
import torch
from torch import nn

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.core.task import export
from fednorm.engines.evaluation import adapt_statistics, initial_client_state
from fednorm.errors import ConfigError
from support import ToyClients, last, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05)
QUICK = {"rounds": 30, "clients": 5, "partition": "feature_shift=contrast"}


def local_statistics(weights, batches):
    """Oracle: plain torch in training mode, all inputs of each layer together."""
    model = nested_model()
    model.load_state_dict(weights)
    model.train()
    seen = {p: [] for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for path, inputs in seen.items():
        model.get_submodule(path).register_forward_pre_hook(
            lambda _m, x, inputs=inputs: inputs.append(x[0].detach())
        )
    for x, _ in batches:
        model(x)
    values = {path: torch.cat(x).transpose(0, 1).flatten(1) for path, x in seen.items()}
    return {path: (v.mean(1), v.var(1)) for path, v in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_statistics_are_mixed_with_the_clients_own(share):
    clients = ToyClients()
    task = task_of("fbn", STEP)
    state = last(task, clients, 3).state
    model = export(task, state)
    own = local_statistics(model.state_dict(), clients.all_batches(1).steps)
    adapt_statistics(task, clients.all_batches(1), share)
    for path, running in state.running.items():
        mean, var = own[path]
        layer = model.get_submodule(path)
        torch.testing.assert_close(layer.running_mean, (1 - share) * running.mean + share * mean)
        torch.testing.assert_close(layer.running_var, (1 - share) * running.var + share * var)
    assert not model.training


def test_adaptation_leaves_the_shared_state_alone():
    clients, task = ToyClients(), task_of("naive", STEP)
    state = last(task, clients, 2).state
    before = {path: r.var.clone() for path, r in state.running.items()}
    export(task, state)
    adapt_statistics(task, clients.all_batches(0), 0.5)
    for path, running in state.running.items():
        assert torch.equal(running.var, before[path])
    again = export(task, state)
    assert torch.equal(again.get_submodule("stem.1").running_var, before["stem.1"])


def test_a_newcomer_starts_from_the_mean_of_the_trained():
    result = last(task_of("fedbn", STEP), ToyClients(), 3)
    start = initial_client_state(result.client_states).tensors
    own = [result.client_states[c].tensors for c in range(3)]
    key = "blocks.1.downsample.1.running_mean"
    torch.testing.assert_close(start[key], (own[0][key] + own[1][key] + own[2][key]) / 3)
    assert start["stem.1.num_batches_tracked"].dtype is torch.int64
    assert int(start["stem.1.num_batches_tracked"]) == 3
    assert initial_client_state({}).tensors == {}
    with_one_that_kept_nothing = initial_client_state(
        {**result.client_states, 3: ClientState()}
    ).tensors
    assert torch.equal(with_one_that_kept_nothing[key], start[key])


@pytest.mark.slow
def test_adaptation_is_tested_per_client_and_helps_shifted_clients():
    plain = fednorm.simulate("naive", evaluate="clients", **QUICK)
    adapted = fednorm.simulate("naive", adapt_statistics=1.0, **QUICK)
    assert adapted.personal
    assert not plain.personal
    assert len(adapted.final.per_client) == 5
    assert adapted.final.worst > plain.final.worst


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedbn", "silobn", "fbn"])
def test_unseen_clients_never_train_but_are_tested(strategy):
    run = fednorm.simulate(strategy, unseen_clients=2, **QUICK)
    assert 0 < run.final.unseen <= 1
    if run.personal:
        assert len(run.final.per_client) == 3


@pytest.mark.slow
def test_an_untrained_client_with_initial_layers_does_worse_than_with_the_mean():
    settings = {**QUICK, "rounds": 60, "partition": "iid", "unseen_clients": 1}
    mean = fednorm.simulate("fedbn", **settings)
    initial = fednorm.simulate("fedbn", unseen_init="initial", **settings)
    assert mean.final.unseen > initial.final.unseen
    assert mean.final.accuracy == initial.final.accuracy


def test_some_clients_must_train():
    with pytest.raises(ConfigError, match="some must train"):
        fednorm.simulate("fbn", clients=3, unseen_clients=3, rounds=1)


def test_adaptation_to_a_batch_of_one_is_refused_before_training():
    with pytest.raises(ConfigError, match="would adapt to a batch of 1 sample"):
        fednorm.simulate("fbn", batch_size=1, adapt_statistics=0.5, rounds=3, clients=3)
    assert fednorm.simulate("fbn", batch_size=1, rounds=3, clients=3).status == "finished"
