"""`fednorm.calibrate` against torch: one machine with all data, and a plain loop over batches."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fednorm
from populations import Population
from support import ToyClients, nested_model

CLIENTS = ToyClients(sizes=(5, 2, 9))
TIGHT = 1e-11


def loaders_of(clients):
    return [clients.all_batches(c).steps for c in clients.all()]


def norms(model):
    return {p: m for p, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}


def assert_same_statistics(got, expected, places=TIGHT):
    for path, layer in norms(expected).items():
        mine = got.get_submodule(path)
        torch.testing.assert_close(mine.running_mean, layer.running_mean, atol=places, rtol=places)
        torch.testing.assert_close(mine.running_var, layer.running_var, atol=places, rtol=places)


def one_machine(model, x):
    """Torch's own layers after one batch that holds all data."""
    model = copy.deepcopy(model).train()
    for layer in norms(model).values():
        layer.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model


def pool_by_hand(model, clients):
    """The inputs of each layer while each batch is normalised by itself, all put together."""
    model, seen = copy.deepcopy(model).train(), {}
    for path, layer in norms(model).items():
        layer.register_forward_pre_hook(
            lambda _m, args, path=path: seen.setdefault(path, []).append(args[0].transpose(0, 1))
        )
    with torch.no_grad():
        for batches in clients:
            for x, _ in batches:
                model(x)
    for path, layer in norms(model).items():
        values = torch.cat([part.flatten(1) for part in seen[path]], 1)
        layer.running_mean, layer.running_var = values.mean(1), values.var(1)
    return model


def merge_all(clients):
    return torch.cat([x for batches in clients for x, _ in batches])


def sequences():
    torch.manual_seed(0)
    layers = (nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 4, 2))
    return nn.Sequential(*layers, nn.BatchNorm1d(4)).double()


def test_exact_is_one_machine_with_all_data_in_one_batch():
    clients = loaders_of(CLIENTS)
    repaired = fednorm.calibrate(nested_model(), clients)
    assert_same_statistics(repaired, one_machine(nested_model(), merge_all(clients)))


def test_one_pass_is_a_loop_over_batches():
    clients = loaders_of(CLIENTS)
    repaired = fednorm.calibrate(nested_model(), clients, exact=False)
    assert_same_statistics(repaired, pool_by_hand(nested_model(), clients))
    apart = fednorm.calibrate(nested_model(), clients)
    with pytest.raises(AssertionError):
        assert_same_statistics(repaired, apart)


def test_sequences_of_any_length():
    generator = torch.Generator().manual_seed(1)
    clients = [[(torch.randn(n, 2, 7, generator=generator).double() + n, 0)] for n in (1, 4, 6)]
    repaired = fednorm.calibrate(sequences(), clients)
    assert_same_statistics(repaired, one_machine(sequences(), merge_all(clients)))


def test_weights_tensors_and_the_model_itself_stay():
    model = nested_model().eval()
    before = copy.deepcopy(model.state_dict())
    repaired = fednorm.calibrate(model, loaders_of(CLIENTS))
    assert type(repaired) is type(model)
    assert not repaired.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert list(repaired.state_dict()) == list(before)
    for name, parameter in repaired.named_parameters():
        assert torch.equal(parameter, before[name])
    assert {type(m) for m in repaired.modules()} == {type(m) for m in model.modules()}


def test_a_client_without_data_is_left_out():
    clients = loaders_of(CLIENTS)
    with_empty = {"a": clients[0], "none": [], "b": clients[1], "c": clients[2]}
    repaired = fednorm.calibrate(nested_model(), with_empty)
    assert_same_statistics(repaired, fednorm.calibrate(nested_model(), clients), places=0)
    with pytest.raises(ValueError, match="no client has a batch"):
        fednorm.calibrate(nested_model(), [[], []])


@pytest.mark.slow
def test_equal_weights_are_those_of_clients_of_one_size():
    """A client that counts as often as a larger one: its data, repeated."""
    small, large = (CLIENTS.all_batches(c).steps for c in (1, 2))
    alike = [small * 9, large * 2]  # 2 and 9 samples a batch
    got = fednorm.calibrate(nested_model(), [small, large], weights="equal")
    expected = fednorm.calibrate(nested_model(), alike)
    for path, layer in norms(expected).items():
        torch.testing.assert_close(got.get_submodule(path).running_mean, layer.running_mean)
    by_examples = fednorm.calibrate(nested_model(), [small, large])
    first = next(iter(norms(got)))
    apart = by_examples.get_submodule(first).running_mean - got.get_submodule(first).running_mean
    assert apart.abs().max() > 1e-3


def test_a_shared_layer_gets_the_moments_of_all_its_inputs():
    norm = nn.BatchNorm1d(2, momentum=None).double()
    model = nn.Sequential(norm, nn.Linear(2, 2).double(), norm)
    x = torch.randn(8, 2, dtype=torch.float64) + 3
    repaired = fednorm.calibrate(model, [[x[:3]], [x[3:]]], exact=False)
    model.train()
    seen = [torch.cat([model[1](norm(part)) for part in (x[:3], x[3:])]), x]
    values = torch.cat(seen)
    torch.testing.assert_close(repaired[0].running_mean, values.mean(0))
    torch.testing.assert_close(repaired[0].running_var, values.var(0))
    assert repaired[0] is repaired[2]
    assert repaired[0].momentum is None


def test_frozen_layers_dropout_and_sync_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), nn.SyncBatchNorm(2)
    ).double()
    model[1].running_mean.fill_(7.0)
    x = torch.randn(10, 3, dtype=torch.float64)
    model.train()
    model[1].eval()
    repaired = fednorm.calibrate(model, [[x[:4]], [x[4:]]])
    assert torch.equal(repaired[1].running_mean, model[1].running_mean)
    inputs = model[3](model[1](model[0](x)))  # no dropout, as in evaluation
    torch.testing.assert_close(repaired[4].running_mean, inputs.mean(0))
    torch.testing.assert_close(repaired[4].running_var, inputs.var(0))
    assert type(repaired[4]) is nn.SyncBatchNorm
    assert repaired.training
    assert not repaired[1].training


def test_layers_that_track_nothing_are_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2))
    repaired = fednorm.calibrate(model, [[torch.randn(6, 2) + 5]])
    assert repaired[0].running_mean is None
    assert repaired[1].running_mean.abs().max() < 1e-5
    with pytest.raises(ValueError, match="no BatchNorm layer with running statistics"):
        fednorm.calibrate(nn.Sequential(nn.Linear(2, 2)), [[torch.randn(6, 2)]])


@pytest.mark.parametrize(
    ("loaders", "error", "message"),
    [
        (DataLoader(TensorDataset(torch.randn(4, 2))), TypeError, "pass a list of them"),
        ([[{"x": torch.ones(2, 2)}]], TypeError, "client 0 has one of dict"),
        ({"b": [torch.full((4, 2), float("nan"))]}, ValueError, "client b cannot be pooled"),
        ([(x for x in [torch.randn(4, 2)])], ValueError, "held 4 examples at first and 0"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(loaders, error, message):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with pytest.raises(error, match=message):
        fednorm.calibrate(model, loaders)


def test_as_users_run_it_after_plain_fedavg():
    """Float32, unequal clients, DataLoaders that end with a batch of one sample."""
    torch.manual_seed(0)
    population = Population(holds=(20, 9, 13))
    sets = [
        TensorDataset(x.float(), y)
        for x, y in (next(iter(population.all_batches(c).steps)) for c in population.all())
    ]
    model = nested_model().float()
    clients = [DataLoader(own, batch_size=max(1, len(own) - 1), shuffle=True) for own in sets]
    repaired = fednorm.calibrate(model, clients)
    everything = torch.cat([own.tensors[0] for own in sets])
    expected = one_machine(model, everything).eval()
    reloaded = nested_model().float().eval()
    reloaded.load_state_dict(repaired.state_dict())
    torch.testing.assert_close(reloaded(everything), expected(everything), atol=1e-4, rtol=1e-4)
