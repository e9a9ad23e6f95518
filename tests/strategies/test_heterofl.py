"""Static BatchNorm against torch's own, which follows with momentum None."""

import pytest
import torch
from torch import nn

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.core.task import export
from fednorm.engines.evaluation import calibrate_for_test
from populations import Population, flat
from support import ToyClients, last, nested_model, task_of

TIGHT = 1e-11
STEP = create_algorithm("dsgd", lr=0.05)
CASES = {
    "unequal clients": Population(holds=(20, 9, 13), steps=(2, 2, 2)),
    "one client": Population(holds=(21,), batch=(4,), steps=(2,), shapes=((1, 8, 8),)),
    "some clients trained": Population(holds=(20, 9, 13), absent={1: (2,), 2: (2,), 3: (2,)}),
}


def trained(clients, kind="fedavg", **fields):
    task = task_of("heterofl", create_algorithm(kind, lr=0.05), count=3, **fields)
    return task, last(task, clients, 3)


def static_model(state, clients, order=None):
    """Torch's layers, reset, in training mode over all batches of all clients, one by one."""
    model = nested_model()
    with torch.no_grad():
        for name, value in state.weights.items():
            model.get_parameter(name).copy_(value)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            layer.reset_running_stats()
    model.train()
    with torch.no_grad():
        for client in order or clients.all():
            for x, _ in clients.all_batches(client).steps:
                model(x)
    return model.eval()


def norms(model):
    return {p: m for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["fedavg", "dsgd"])
def test_statistics_are_the_cumulative_average_over_all_batches(case, kind):
    """Each batch weighs the same, large or small; variances are torch's, unbiased."""
    clients = CASES[case]
    if kind == "dsgd":
        shapes, holds = clients.shapes, clients.holds
        clients = Population(holds, clients.batch, (1,) * len(holds), shapes)
    task, result = trained(clients, kind)
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model = static_model(result.state, clients)
    for path, layer in norms(model).items():
        got = final.running[path]
        torch.testing.assert_close(got.mean, layer.running_mean, rtol=0, atol=TIGHT)
        torch.testing.assert_close(got.var, layer.running_var, rtol=0, atol=TIGHT)
    ((x, _),) = clients.test(0)
    torch.testing.assert_close(export(task, final)(x), model(x), rtol=0, atol=1e-10)


def test_the_order_of_clients_does_not_matter():
    clients = CASES["unequal clients"]
    task, result = trained(clients)
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    for path, layer in norms(static_model(result.state, clients, (2, 0, 1))).items():
        torch.testing.assert_close(final.running[path].var, layer.running_var, rtol=0, atol=TIGHT)


def test_training_tracks_nothing():
    task, result = trained(CASES["unequal clients"])
    for path, running in result.state.running.items():
        before = task.initial_state.running[path]
        assert torch.equal(running.mean, before.mean)
        assert torch.equal(running.var, before.var)


def test_pooling_is_a_switch():
    """With it, the statistics are those of all values together."""
    clients = CASES["unequal clients"]
    task, result = trained(clients, statistics="pool")
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model, seen = static_model(result.state, clients).train(), {}
    for path, layer in norms(model).items():
        own = seen.setdefault(path, [])
        layer.register_forward_pre_hook(lambda _m, x, own=own: own.append(flat(x[0])))
    for client in clients.all():
        for x, _ in clients.all_batches(client).steps:
            model(x)
    for path, values in seen.items():
        together = torch.cat(values, 1)
        got = final.running[path]
        torch.testing.assert_close(got.mean, together.mean(1), rtol=0, atol=TIGHT)
        torch.testing.assert_close(got.var, together.var(1), rtol=0, atol=TIGHT)


def test_after_dsgd_too_they_are_torchs_cumulative_average():
    clients = ToyClients(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP)
    result = last(task, clients, 5)
    assert all(torch.equal(r.var, torch.ones_like(r.var)) for r in result.state.running.values())
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model = nested_model().train()
    model.load_state_dict(export(task, result.state).state_dict())
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            layer.reset_running_stats()
    for client in range(3):
        for x, _ in clients.all_batches(client).steps:
            model(x)
    expected = model.state_dict()
    for path, running in final.running.items():
        mean, var = expected[f"{path}.running_mean"], expected[f"{path}.running_var"]
        torch.testing.assert_close(running.mean, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(running.var, var, rtol=0, atol=1e-12)


def test_after_dsgd_too_pooling_takes_the_moments_of_all_values():
    clients = ToyClients(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP, statistics="pool")
    result = last(task, clients, 5)
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model, seen = nested_model().train(), {}
    model.load_state_dict(export(task, result.state).state_dict())
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            seen[path] = []
            layer.register_forward_pre_hook(
                lambda _, x, seen=seen[path]: seen.append(x[0].detach())
            )
    for client in range(3):
        for x, _ in clients.all_batches(client).steps:
            model(x)
    for path, inputs in seen.items():
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        running = final.running[path]
        torch.testing.assert_close(running.mean, values.mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(running.var, values.var(1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_it_is_tested_with_calibrated_statistics():
    run = fednorm.simulate("heterofl", rounds=40, partition="iid", clients=3)
    assert run.final.accuracy > 0.6
