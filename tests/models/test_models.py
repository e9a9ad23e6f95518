import sys

import pytest
import torch
from torch import nn

from fednorm.errors import UnknownNameError
from fednorm.models import MODELS, create_model

NORMS = {"mlp": 2, "cnn": 2, "resnet": 6, "tutorial_cnn": 2, "fbn_cnn": 4}
NORMS |= {"lenet": 2, "resnet20": 19, "resnet18": 20, "resnet50": 53, "mobilenet_v2": 52}
NORMS |= {"deeplabv3plus": 60}


def types(model):
    return [type(module).__name__ for module in model if len(list(module.children())) == 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_batch_norms(name):
    model = create_model(name, (1, 16, 16), 10, seed=0)
    found = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(found) == NORMS[name]


def test_mlp_layers():
    model = create_model("mlp", (2,), 10, seed=0)
    hidden = ["Linear", "ReLU", "BatchNorm1d"]
    assert types(model) == ["Flatten", *hidden, *hidden, "Linear"]
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [128, 64, 10]
    listed = create_model("mlp", (2,), 10, seed=0, hidden=[5])
    assert [m.out_features for m in listed if isinstance(m, nn.Linear)] == [5, 10]


@pytest.mark.parametrize("hidden", ["128", 128, [0], [1.5], None])
def test_mlp_refuses_invalid_widths(hidden):
    with pytest.raises(ValueError, match="hidden of model 'mlp' must be a list of positive"):
        create_model("mlp", (2,), 10, seed=0, hidden=hidden)


def test_cnn_layers():
    model = create_model("cnn", (1, 8, 8), 10, seed=0)
    block = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    assert types(model) == [*block, *block, "Flatten", "Linear"]
    assert [m.out_channels for m in model if isinstance(m, nn.Conv2d)] == [16, 32]
    assert model[-1].in_features == 32 * 2 * 2


def test_fbn_cnn_is_table_1():
    model = create_model("fbn_cnn", (3, 32, 32), 10, seed=0)
    conv = ["Conv2d", "ReLU", "BatchNorm2d"]
    stage = [*conv, *conv, "MaxPool2d", "Dropout"]
    assert types(model) == [*stage, *stage, "Flatten", "Linear", "ReLU", "Linear"]
    sizes = [(m.in_channels, m.out_channels) for m in model if isinstance(m, nn.Conv2d)]
    assert sizes == [(3, 64), (64, 64), (64, 128), (128, 128)]
    linear = [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]
    assert linear == [(8192, 128), (128, 10)]
    assert [m.p for m in model if isinstance(m, nn.Dropout)] == [0.25, 0.25]


def test_tutorial_cnn_has_the_tutorials_tensors():
    state = create_model("tutorial_cnn", (1, 28, 28), 10, seed=0).state_dict()
    assert state["conv1.weight"].shape == (32, 1, 3, 3)
    assert state["norm1.running_mean"].shape == (32,)
    assert state["conv2.weight"].shape == (64, 32, 3, 3)
    assert state["norm2.weight"].shape == (64,)
    assert state["fc.weight"].shape == (10, 7 * 7 * 64)


def test_tutorial_cnn_normalizes_before_the_relu():
    model = create_model(
        "tutorial_cnn", (1, 4, 4), 2, seed=0
    )  # in training mode, so BN does something
    x = torch.randn(3, 1, 4, 4)
    first = nn.functional.max_pool2d(model.norm1(model.conv1(x)).relu(), 2)
    second = nn.functional.max_pool2d(model.norm2(model.conv2(first)).relu(), 2)
    torch.testing.assert_close(model(x), model.fc(second.flatten(1)))


def test_resnet_hides_a_batch_norm_in_its_downsample_path():
    model = create_model("resnet", (1, 8, 8), 10, seed=0)
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    unnamed = [name for name in norms if "bn" not in name and "norm" not in name]
    assert norms.count("blocks.1.downsample.1") == 1
    assert unnamed == ["stem.1", "blocks.1.downsample.1"]


def test_resnet_block_adds_its_input():
    block = create_model("resnet", (1, 8, 8), 10, seed=0).blocks[0].eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(block(x), x.relu())


def test_resnet_widths():
    model = create_model("resnet", (3, 9, 9), 4, seed=0, widths=[4, 8, 8])
    assert model.blocks(model.stem(torch.randn(2, 3, 9, 9))).shape == (2, 8, 3, 3)
    with pytest.raises(ValueError, match="at least one block"):
        create_model("resnet", (3, 9, 9), 4, seed=0, widths=[])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cnn", {"width": 0}),
        ("tutorial_cnn", {"hidden_channels": 0}),
        ("fbn_cnn", {"dropout": 1}),
        ("mobilenet_v2", {"dropout": 1}),
        ("mobilenet_v2", {"stem": "small"}),
        ("resnet18", {"stem": "small"}),
        ("resnet50", {"stem": 3}),
        ("deeplabv3plus", {"backbone": "resnet18"}),
    ],
)
def test_fields_are_checked(name, fields):
    with pytest.raises(ValueError, match=f"of model '{name}' must be"):
        create_model(name, (1, 8, 8), 10, seed=0, **fields)


def test_unknown_names_and_fields_are_explained():
    with pytest.raises(UnknownNameError, match="did you mean 'resnet'"):
        create_model("resnett", (1, 8, 8), 10, seed=0)
    with pytest.raises(UnknownNameError, match="did you mean 'hidden'"):
        create_model("mlp", (2,), 10, seed=0, hiden=(3,))


OWN = """
import torch
from torch import nn

def sized(shape, classes, extra=0):
    return nn.Linear(shape[0], classes + extra)

def fixed():
    return nn.Linear(2, 3)

def any_of(**settings):
    model = nn.Linear(2, settings["classes"])
    model.settings = settings
    return model

def wrong():
    return "no network"

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "my_broken.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "my_networks"
    sys.modules.pop("my_networks", None)


def test_own_function_gets_the_arguments_it_takes(own):
    assert create_model(f"{own}:sized", (2,), 3, seed=0).weight.shape == (3, 2)
    assert create_model(f"{own}:sized", (2,), 3, seed=0, extra=1).weight.shape == (4, 2)
    assert create_model(f"{own}:fixed", (9,), 9, seed=0).weight.shape == (3, 2)
    settings = create_model(f"{own}:any_of", (2,), 4, seed=0, depth=1).settings
    assert settings == {"shape": (2,), "classes": 4, "depth": 1}


def test_own_function_is_seeded_without_changing_the_global_state(own):
    state, path = torch.get_rng_state(), list(sys.path)
    first, second = (create_model(f"{own}:fixed", (2,), 3, seed=1) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, create_model(f"{own}:fixed", (2,), 3, seed=2).weight)
    assert torch.equal(state, torch.get_rng_state())
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_module:f", ValueError, "needs module 'no_such_module', but there is none"),
        ("torch.no_such:f", ValueError, "needs module 'torch.no_such', but there is none"),
        ("my_broken:f", ModuleNotFoundError, "no_such_package"),
        ("my_networks:size", UnknownNameError, "function of module .*did you mean 'sized'"),
        ("my_networks:number", UnknownNameError, "Known: any_of, fixed, sized, wrong"),
        ("my_networks:wrong", TypeError, "must return a torch.nn.Module, but returned str"),
        ("my_networks:", ValueError, "'package.module:function', but got 'my_networks:'"),
        (":sized", ValueError, "'package.module:function', but got ':sized'"),
    ],
)
def test_an_invalid_own_function_is_explained(own, name, error, message):
    del own
    with pytest.raises(error, match=message):
        create_model(name, (2,), 3, seed=0)


def test_own_function_refuses_fields_it_does_not_take(own):
    with pytest.raises(UnknownNameError, match=r"argument of model .*did you mean 'extra'"):
        create_model(f"{own}:sized", (2,), 3, seed=0, extras=1)
