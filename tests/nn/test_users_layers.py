"""BatchNorm layers of other libraries and of users: kept in what they do, or refused by name."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import NormLayer
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.convert import ConversionError, remove, to_fed_batch_norm, to_sample_norm
from fednorm.strategies import STRATEGIES
from support import ToyClients, last, task_of

every = pytest.mark.parametrize("name", sorted(STRATEGIES))
STEP = create_algorithm("dsgd", lr=0.05)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: torch's forward pass written out, then `drop`, then `act`."""

    def __init__(self, channels, act=None, drop=None):
        super().__init__(channels)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x,
            *(self.running_mean, self.running_var, self.weight, self.bias),
            *(self.training, self.momentum, self.eps),
        )
        return self.act(self.drop(x))


class SyncBatchNormAct(nn.SyncBatchNorm):
    """As timm's: what follows torch's forward pass is there only if it was attached."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class ActFirst(BatchNormAct2d):
    """Looks like timm's layer and is not."""

    def forward(self, x):
        return self.drop(super(BatchNormAct2d, self).forward(self.act(x)))


class Positive(nn.BatchNorm2d):
    """Asks torch's forward pass, and continues with its result."""

    def forward(self, input):  # noqa: A002 (torch's own name)
        return torch.relu(super().forward(input))

    def channels_doubled(self):
        return 2 * self.num_features


class Flexible(_BatchNorm):
    """BatchNorm for any number of dimensions."""

    def _check_input_dim(self, input):  # noqa: A002 (torch's own name)
        if input.dim() < 2:
            raise ValueError("expected a batch")


class Alone(nn.BatchNorm2d):
    def forward(self, x):
        return functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


class AloneInEvaluation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) if self.training else x * self.weight[:, None, None]


class Twice(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(super().forward(x))


class KeepsItsOwnBooks(nn.BatchNorm2d):
    def forward(self, x):
        if self.training:
            self.running_mean.mul_(0.9)
        return super().forward(x)


class Needy(nn.BatchNorm2d):
    def forward(self, x, gain):
        return super().forward(x) * gain


class Frozen(nn.Module):
    """As torchvision's FrozenBatchNorm2d."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels, dtype=torch.float64) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def model_with(*layers):
    """Put layers of 4 channels between a convolution and a classifier; float64."""
    torch.manual_seed(0)
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Conv2d(4, 4, 3), *pool).double()


def residual_or_skip(name):
    if name == "fixup":
        pytest.skip("Fixup is for residual networks")


def image(size=5):
    return torch.randn(size, 1, 8, 8, dtype=torch.float64, generator=torch.manual_seed(1))


def test_a_layer_that_activates_stays_one():
    layer = BatchNormAct2d(4, nn.PReLU(4)).double()
    converted = to_fed_batch_norm(nn.Sequential(layer)).model
    assert isinstance(converted[0], FedBatchNorm)
    assert list(converted.state_dict()) == list(nn.Sequential(layer).state_dict())
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    for mode in (True, False):
        assert torch.equal(converted.train(mode)(x), layer.train(mode)(x))
    for key, value in layer.state_dict().items():
        assert torch.equal(converted[0].state_dict()[key], value)


def test_a_replaced_layer_that_activates_keeps_drop_and_act():
    drop, act = nn.Dropout(0.5), nn.PReLU(4)
    model = nn.Sequential(BatchNormAct2d(4, act, drop)).double().eval()
    model[0].drop.train()
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    expected = {"gn": functional.group_norm(x, 2), "ln": functional.group_norm(x, 1)}
    expected |= {"in": functional.group_norm(x, 4), "none": x}
    for name, normalised in expected.items():
        converted = create_strategy(name).convert(model).model
        assert converted[0].drop.training
        assert not converted[0].act.training
        assert "0.act.weight" in converted.state_dict()
        assert converted[0].act is not act
        converted[0].drop.eval()
        torch.testing.assert_close(converted(x), functional.prelu(normalised, act.weight))
        converted[0].drop.train()
        assert (converted(x) == 0).float().mean() > 0.3


@pytest.mark.slow
@every
def test_a_model_with_such_layers_trains(name):
    residual_or_skip(name)
    model = model_with(BatchNormAct2d(4), nn.Conv2d(4, 4, 1), SyncBatchNormAct(4))
    if name in {"gn_ws", "fedwon", "dualbn"}:
        model[2] = nn.Conv2d(4, 4, 3, padding=1).double()
    task = task_of(name, STEP, model=model)
    kept = [m for m in task.model.modules() if isinstance(m, nn.ReLU)]
    assert len(kept) == 2
    result = last(task, ToyClients(), 3)
    assert all(torch.isfinite(t).all() for t in result.state.weights.values())
    inside = []
    task.model[1].register_forward_hook(lambda *args: inside.append(args[2]))
    task.model.eval()(image())
    assert inside[0].min() == 0


@every
def test_what_looks_like_such_a_layer_is_not_taken_for_one(name):
    layer = ActFirst(4, nn.Tanh())
    model = model_with(layer)
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    try:
        converted = create_strategy(name).convert(model).model
    except ConversionError as error:
        assert "'1' (ActFirst)" in str(error)  # noqa: PT017 (only some strategies refuse)
    except ValueError as error:
        assert "residual" in str(error)  # noqa: PT017 (as above)
    else:
        assert isinstance(converted[1], ActFirst)
        with torch.no_grad():
            converted[1].running_mean.fill_(0.5)
            layer.running_mean.fill_(0.5)
        assert torch.equal(converted[1].eval()(x), layer.eval()(x)) or name == "switchnorm"


@pytest.mark.slow
@every
def test_a_forward_pass_that_asks_super_is_kept_or_refused_by_name(name):
    model = model_with(Positive(4))
    try:
        task = task_of(name, STEP, model=model)
    except ConversionError as error:
        said = str(error)
        assert "'1' (Positive)" in said or name == "fixup"
        return
    layer = task.model[1]
    assert isinstance(layer, Positive)
    assert isinstance(layer, NormLayer)
    assert layer.channels_doubled() == 8
    seen = []
    layer.register_forward_hook(lambda *args: seen.append(args[2]))
    last(task, ToyClients(), 2)
    assert seen
    assert all(y.min() == 0 for y in seen)


def test_strategies_that_keep_batch_norm_take_a_forward_pass_that_asks_super():
    for name in ("naive", "fixbn", "fbn", "fedtan", "fedbn", "silobn"):
        assert isinstance(create_strategy(name).convert(model_with(Positive(4))).model[1], Positive)
    for make in (remove, lambda model: to_sample_norm(model, 2)):
        with pytest.raises(ConversionError, match=r"'1' \(Positive\) .* would lose"):
            make(model_with(Positive(4)))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Alone, AloneInEvaluation, Twice, KeepsItsOwnBooks, Needy])
@every
def test_any_other_forward_pass_is_refused_by_name(name, cls):
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(cls(4)))
    with pytest.raises(ConversionError, match=rf"'1\.0' \({cls.__name__}\).*custom forward pass"):
        create_strategy(name).convert(model)


def test_looking_at_a_layer_calls_no_hooks_and_draws_no_random_numbers():
    class Noisy(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + torch.randn(())

    model = model_with(Noisy(4), BatchNormAct2d(4))
    calls = []
    for layer in (model[1], model[2], model[2].act):
        layer.register_forward_hook(lambda *_: calls.append(1))
    before = torch.random.get_rng_state()
    to_fed_batch_norm(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert calls == []
    assert int(model[1].num_batches_tracked) == 0


def test_a_class_that_checks_its_input_otherwise_goes_on_doing_so():
    converted = to_fed_batch_norm(nn.Sequential(Flexible(4))).model
    for shape in ((3, 4), (3, 4, 5), (3, 4, 5, 5)):
        assert converted(torch.randn(shape)).shape == shape
    with pytest.raises(ValueError, match="expected a batch"):
        converted(torch.randn(4))


def test_attributes_that_a_converted_layer_needs_are_refused():
    class Clashing(nn.BatchNorm2d):
        def report(self):
            return "mine"

    with pytest.raises(ConversionError, match=r"'1' \(Clashing\) has attributes .* report; rename"):
        to_fed_batch_norm(model_with(Clashing(4)))


def test_a_parametrized_layer_is_refused_by_name():
    model = model_with(nn.BatchNorm2d(4))
    parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    with pytest.raises(ConversionError, match=r"'1' .* parametrized"):
        to_fed_batch_norm(model)


@pytest.mark.parametrize("convert", [to_fed_batch_norm, remove, lambda m: to_sample_norm(m, 2)])
@pytest.mark.parametrize("layer", [Positive, BatchNormAct2d])
def test_a_converted_model_can_be_copied_pickled_and_converted_again(convert, layer):
    if layer is Positive:
        convert = to_fed_batch_norm
    model = model_with(layer(4))
    once = convert(model).model.eval()
    x = image()
    for other in (copy.deepcopy(once), pickle.loads(pickle.dumps(once))):  # noqa: S301 (our own)
        assert type(other[1]) is type(once[1])
        assert torch.equal(other(x), once(x))
    again = to_fed_batch_norm(to_fed_batch_norm(model).model).model.eval()
    assert type(again[1]) is type(to_fed_batch_norm(model).model[1])
    assert torch.equal(again(x), model.eval()(x))
    if layer is BatchNormAct2d:
        torch.testing.assert_close(convert(again).model(x), once(x))


@pytest.mark.slow
@every
def test_frozen_layers_are_left_alone_and_reported(name):
    residual_or_skip(name)
    frozen = Frozen(4)
    model = model_with(frozen, nn.BatchNorm2d(4))
    (kept,) = create_strategy(name).convert(model).skipped
    assert (kept.path, kept.type) == ("1", "Frozen")
    task = task_of(name, STEP, model=model)
    assert type(task.model[1]) is Frozen
    result = last(task, ToyClients(), 2)
    for key, value in frozen.named_buffers():
        torch.testing.assert_close(result.state.buffers[f"1.{key}"], value, rtol=1e-14, atol=0)


def test_what_is_kept_is_reported_with_the_reason():
    class FromScratch(Frozen):
        def __init__(self, channels):
            super().__init__(channels)
            del self.weight, self.bias
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    instance = nn.InstanceNorm2d(4, track_running_stats=True)
    silent = nn.InstanceNorm2d(4)
    model = model_with(Frozen(4), FromScratch(4), instance, silent, nn.BatchNorm2d(4))
    conversion = to_fed_batch_norm(model)
    assert [(kept.path, kept.type) for kept in conversion.skipped] == [
        ("1", "Frozen"),
        ("2", "FromScratch"),
        ("3", "InstanceNorm2d"),
    ]
    frozen, scratch, instance = (kept.reason for kept in conversion.skipped)
    assert "frozen" in frozen
    assert "not one of torch's BatchNorm" in scratch
    assert "averaged" in instance


@every
def test_statistics_of_instance_norm_are_averaged(name):
    residual_or_skip(name)
    norm = nn.InstanceNorm2d(4, track_running_stats=True, momentum=0.5)
    model = model_with(norm, nn.BatchNorm2d(4))
    clients = ToyClients(sizes=(5, 3))
    task = task_of(name, STEP, model=model)
    conv = copy.deepcopy(task.model[0])
    result = last(task, clients, 1)
    batches = [clients.batches(client, 1).steps[0][0] for client in (0, 1)]
    means = [0.5 * conv(batch).mean((0, 2, 3)).detach() for batch in batches]
    if name == "fedbn":  # whose clients keep normalization layers of every kind
        for client, mean in enumerate(means):
            kept = result.client_states[client].tensors
            torch.testing.assert_close(kept["1.running_mean"], mean)
        return
    expected = 5 / 8 * means[0] + 3 / 8 * means[1]
    torch.testing.assert_close(result.state.buffers["1.running_mean"], expected)
