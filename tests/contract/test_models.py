"""What every model promises; a new one is tested by being registered."""

import dataclasses
import functools

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.contract import CHECKS, examine_plugin
from fednorm.errors import ConversionError
from fednorm.models import MODELS, create_model
from fednorm.strategies import STRATEGIES, create_strategy

SHAPE, CLASSES = (3, 16, 16), 4
IMAGES = [(1, 8, 8), (3, 32, 32), (1, 28, 28), (2, 5, 9), (2, 17, 23)]
LEAST = {"mlp": 1, "resnet": 1, "lenet": 16, "deeplabv3plus": 16}
LEAST |= {"resnet18": 8, "resnet50": 8, "mobilenet_v2": 8}  # pixels of a side; others need 4
DENSE = {"deeplabv3plus"}  # one score for every pixel
FLAT = {"mlp"}  # takes points as well as images
CASES = [(n, s) for n in MODELS for s in IMAGES if min(s[1:]) >= LEAST.get(n, 4)]
REFUSED = {
    ("mlp", "in"): "leave one value per group",
    ("mlp", "gn_ws"): "GnWs needs convolutions",
    ("mlp", "fedwon"): "FedWon needs convolutions",
    ("mlp", "fixup"): "Fixup needs residual branches",
    ("cnn", "fixup"): "Fixup needs residual branches",
    ("tutorial_cnn", "fixup"): "Fixup needs residual branches",
    ("fbn_cnn", "fixup"): "Fixup needs residual branches",
    ("lenet", "fixup"): "Fixup needs residual branches",
    ("deeplabv3plus", "fixup"): "Fixup needs a linear classifier",
    ("deeplabv3plus", "fedfn"): "DeepLab has no linear layer that could be its classifier",
    ("deeplabv3plus", "in"): r"shape \(2, 32, 1, 1\) leave one value per group",
}
CONVERSIONS = [(model, name) for model in MODELS for name in STRATEGIES]
every = pytest.mark.parametrize("name", sorted(MODELS))
pytestmark = pytest.mark.usefixtures("narrow_networks")  # tests of each model count its channels


@functools.cache
def plain(name):
    return create_model(name, SHAPE, CLASSES, seed=0)


@every
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = MODELS[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.__doc__.partition("\n")[0].endswith("."), cls.__doc__
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


def test_all_are_listed_by_the_command():
    result = CliRunner().invoke(app, ["list", "models"])
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert MODELS.keys() <= listed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_takes_images_and_returns_logits(name, shape):
    model = create_model(name, shape, classes=7, seed=0)
    logits = model(torch.randn(3, *shape))
    assert logits.shape == ((3, 7, *shape[1:]) if name in DENSE else (3, 7))
    assert logits.exp().sum(1).sub(1).abs().max() > 0.01  # not log probabilities
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@every
def test_keeps_the_contract(name):
    """`fednorm check` calls the same checks."""
    found = list(examine_plugin(name, "model"))
    assert [one for one in found if one.problem] == []
    assert len(found) > len(CHECKS["model"])


@pytest.mark.slow
@every
def test_the_seed_alone_decides_the_weights(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = create_model(name, (1, 16, 16), 10, seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = create_model(name, (1, 16, 16), 10, seed=3).state_dict()
    other = create_model(name, (1, 16, 16), 10, seed=4).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in FLAT])
def test_convolutions_refuse_points(name):
    with pytest.raises(ValueError, match=rf"model '{name}' needs images .* shape \(2,\); choose"):
        create_model(name, (2,), 10, seed=0)


@pytest.mark.parametrize("name", [name for name in MODELS if LEAST.get(name, 4) > 1])
def test_images_that_are_too_small_are_refused(name):
    least = LEAST.get(name, 4)
    logits = create_model(name, (1, least, least), 2, seed=0)(torch.zeros(2, 1, least, least))
    assert logits.shape[:2] == (2, 2)
    with pytest.raises(
        ValueError, match=rf"at least {least}x{least} pixels.* shape \(1, {least - 1}, 40\)"
    ):
        create_model(name, (1, least - 1, 40), 10, seed=0)


def convert_and_run(model, name):
    conversion = create_strategy(name).convert(plain(model))
    with torch.no_grad():
        return conversion, conversion.model.train()(torch.randn(2, *SHAPE))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [c for c in CONVERSIONS if c not in REFUSED])
def test_every_strategy_converts_it(model, name):
    before = {key: tensor.clone() for key, tensor in plain(model).state_dict().items()}
    conversion, scores = convert_and_run(model, name)
    norms = {path for path, m in plain(model).named_modules() if isinstance(m, _BatchNorm)}
    assert norms
    assert norms <= {replacement.path for replacement in conversion.replaced}
    assert scores.shape[:2] == (2, CLASSES)
    assert torch.isfinite(scores).all()
    after = plain(model).state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize(("model", "name"), REFUSED)
def test_a_strategy_that_does_not_says_why(model, name):
    with pytest.raises((ValueError, ConversionError), match=REFUSED[model, name]):
        convert_and_run(model, name)
