"""Batches of one sample: allowed where every channel has more than one value of it."""

import pytest
import torch
from torch import nn

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.doctor import examine
from fednorm.engines import loop, merged_batch, stacked
from fednorm.errors import ConfigError
from fednorm.experiment.diagnostics import central_gradient
from fednorm.experiment.prepare import note_single_values
from fednorm.strategies import STRATEGIES, create_strategy
from support import ToyClients, assert_same_state, last, nested_model, task_of

ONE = {"batch_size": 1, "rounds": 2, "seeds": 1, "clients": 3}


def with_dense_norm():
    """A BatchNorm layer with 36 values per channel and sample, and one with a single value."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 6)]
    return nn.Sequential(*body, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fixup"}))  # no residual branches
def test_every_strategy_trains_a_convolutional_network_on_single_images(name):
    result = fednorm.compare([name], model="cnn", **ONE).runs[0]
    assert result.status == "finished"


@pytest.mark.slow
def test_one_client_with_single_images_is_plain_torch():
    step = create_algorithm("fedavg", lr=0.05, momentum=0.9)
    clients = ToyClients(sizes=(1,), steps=3)
    ours = last(task_of("naive", step), clients, 4).state
    model = nested_model().train()
    for round_ in range(1, 5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x, y in clients.batches(0, round_).steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_same_state(ours, model)


@pytest.mark.parametrize("engine", ["merged", "stacked"])
def test_engines_agree_on_single_images(engine):
    clients = ToyClients(sizes=(1, 1, 1))
    task = task_of("naive", create_algorithm("dsgd", lr=0.05))
    expected = last(task, clients, 3).state
    if engine == "merged":
        *_, got = merged_batch.rounds(task, clients, 3)
    else:
        trainer = stacked.StackedTrainer(task, 3)
        *_, got = loop.rounds(task, clients, 3, train=trainer.train)
        assert max(trainer.stacks) == 3
    for name, value in expected.weights.items():
        torch.testing.assert_close(got.state.weights[name], value, rtol=0, atol=1e-9)
    for path, running in expected.running.items():
        torch.testing.assert_close(got.state.running[path].var, running.var, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "name", sorted(n for n in STRATEGIES if create_strategy(n).needs_batch_statistics)
)
def test_a_layer_with_one_value_per_channel_is_named(name):
    with pytest.raises(ConfigError, match=r"batch of 1 sample, of which layer '4' gets one value"):
        fednorm.compare([name], model=with_dense_norm(), **ONE)


def test_one_machine_with_a_single_sample_is_told_the_same():
    settings = {**ONE, "clients": 1, "model": "mlp"}
    with pytest.raises(ConfigError, match=r"centralized: client 0 .* would train on a batch of 1"):
        fednorm.compare(["centralized"], **settings)
    several = fednorm.compare(["centralized"], **{**settings, "clients": 3})
    assert several.runs[0].status == "finished"


def test_strategies_without_batch_statistics_take_one_value_per_channel():
    for name in ("fbn", "ln", "none"):
        result = fednorm.compare([name], model=with_dense_norm(), **ONE).runs[0]
        assert result.status == "finished"


@pytest.mark.slow
def test_adaptation_needs_more_than_one_value_too():
    settings = {**ONE, "adapt_statistics": 0.5}
    with pytest.raises(ConfigError, match="would adapt to a batch of 1 sample, of which layer '4'"):
        fednorm.compare(["fbn"], model=with_dense_norm(), **settings)
    for name, model in (("fbn", "cnn"), ("gn", "mlp")):  # many values; nothing to adapt
        assert fednorm.compare([name], model=model, **settings).runs[0].status == "finished"


def test_the_reference_gradient_of_a_single_image_is_measured():
    clients = ToyClients(sizes=(1,))
    task = task_of("naive", create_algorithm("dsgd", lr=0.05))
    found = central_gradient(task, task.initial_state, clients)
    model = nested_model().train()
    ((x, y),) = clients.batches(0, 1).steps
    nn.functional.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12)
    dense = task_of("fbn", create_algorithm("dsgd", lr=0.05), model=with_dense_norm().double())
    assert central_gradient(dense, dense.initial_state, ToyClients(sizes=(1,), classes=10)) is None


@pytest.mark.slow
def test_the_doctor_warns_of_single_values_only():
    settings = {"partition": "iid", "batch_size": 1, "clients": 4, "batches": 2, "budget": 0}
    for model in ("cnn", "resnet"):
        report = examine(model, **settings)
        assert "batch_of_one" not in {w.code for w in report.warnings}
        assert report.clients.left_out == ()
        assert report.clients.unmeasured is None
    report = examine(with_dense_norm(), **settings)
    (warning,) = [w for w in report.warnings if w.code == "batch_of_one"]
    assert "1 BatchNorm layers get one value per channel" in warning.text
    assert len(report.clients.left_out) == 4


def test_layers_that_do_not_train_are_not_noted():
    model = with_dense_norm()
    for training, expected in ((True, ["4"]), (False, [])):
        model[4].train(training)
        with note_single_values(model) as noted:
            try:
                model(torch.randn(1, 1, 8, 8))
            except ValueError:
                assert training
        assert noted == expected
    assert not model[4]._forward_pre_hooks
