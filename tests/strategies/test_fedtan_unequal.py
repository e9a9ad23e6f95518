"""FedTAN under fedavg: one machine's gradient, where a client's values weigh what it holds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from fednorm.engines import loop, merged_batch
from populations import Population, flat, follow, population
from support import ToyClients, assert_same_state, last, nested_model, task_of

LR, BETA, TIGHT = 0.05, 0.1, 1e-11
ONE = Population(batch=(4, 7, 3), steps=(1, 1, 1), absent={2: (1,)})
MESSAGES = pytest.mark.parametrize("shared_message", [False, True])


class Weighted(nn.Module):
    """BatchNorm over samples that weigh unequally: plain differentiable torch."""

    def __init__(self, plain):
        super().__init__()
        self.weight, self.bias, self.eps = plain.weight, plain.bias, plain.eps
        self.mean, self.var = plain.running_mean, plain.running_var
        self.share = None  # the weight of each sample

    def forward(self, u):
        axes, view = [0, *range(2, u.dim())], (1, -1, *[1] * (u.dim() - 2))
        values = u[0, 0].numel()
        c = self.share.view(-1, *[1] * (u.dim() - 1)) / values
        mean = (c * u).sum(axes)
        var = (c * (u - mean.view(view)) ** 2).sum(axes)
        found = (len(u) * values, mean.detach(), var.detach())
        self.mean, self.var = follow(self.mean, self.var, found, BETA)
        normal = (u - mean.view(view)) / (var.view(view) + self.eps).sqrt()
        return normal * self.weight.view(view) + self.bias.view(view)


def central(model, clients, rounds, weight_decay=0.0):
    """One machine: loss and BatchNorm over all batches, sample n of client i weighing |D_i|/b_i."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Weighted(layer))
    layers = {p: m for p, m in model.named_modules() if isinstance(m, Weighted)}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=weight_decay)
    for round_ in range(1, rounds + 1):
        drawn = [clients.batches(c, round_) for c in clients.participants(round_)]
        held = sum(b.examples for b in drawn)
        x, y = (torch.cat([b.steps[0][part] for b in drawn]) for part in (0, 1))
        sizes = torch.tensor([len(b.steps[0][0]) for b in drawn])
        each = torch.tensor([b.examples / held for b in drawn], dtype=torch.float64) / sizes
        share = each.repeat_interleave(sizes)
        for layer in layers.values():
            layer.share = share
        optimizer.zero_grad()
        (share * functional.cross_entropy(model(x), y, reduction="none")).sum().backward()
        optimizer.step()
    return model, layers


def assert_same(state, model, layers):
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)
    assert set(layers) == set(state.running)
    for path, layer in layers.items():
        got = state.running[path]
        torch.testing.assert_close(got.mean, layer.mean, rtol=0, atol=TIGHT)
        torch.testing.assert_close(got.var, layer.var, rtol=TIGHT, atol=TIGHT)


@pytest.mark.slow
@MESSAGES
def test_one_step_is_one_machines(shared_message):
    task = task_of("fedtan", create_algorithm("fedavg", lr=LR), shared_message=shared_message)
    state = last(task, ONE, 3).state
    assert_same(state, *central(nested_model(), ONE, 3))


@pytest.mark.slow
def test_one_step_with_weight_decay():
    task = task_of("fedtan", create_algorithm("fedavg", lr=LR, weight_decay=0.01))
    state = last(task, ONE, 3).state
    assert_same(state, *central(nested_model(), ONE, 3, weight_decay=0.01))


@pytest.mark.slow
def test_equal_batches_of_unequal_clients():
    clients = Population(holds=(900, 6, 24), steps=(1, 1, 1))
    state = last(task_of("fedtan", create_algorithm("fedavg", lr=LR)), clients, 3).state
    assert_same(state, *central(nested_model(), clients, 3))


@pytest.mark.slow
def test_layers_of_several_kinds():
    """Values of two axes and of none; layers without γ and β are the plain function."""

    def model():
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(),
            nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4),
        ]  # fmt: skip
        return nn.Sequential(*layers).double()

    state = last(task_of("fedtan", create_algorithm("fedavg", lr=LR), model=model()), ONE, 3).state
    assert_same(state, *central(model(), ONE, 3))


@pytest.mark.slow
@MESSAGES
@pytest.mark.parametrize("engine", [loop.rounds, merged_batch.rounds])
def test_dsgd_is_torchs_batch_norm_on_the_concatenated_batch(shared_message, engine):
    clients = ToyClients(sizes=(2, 7, 4))
    task = task_of("fedtan", create_algorithm("dsgd", lr=LR), shared_message=shared_message)
    *_, result = engine(task, clients, 5)
    model = nested_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for round_ in range(1, 6):
        x, y = clients.union(round_)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same_state(result.state, model, TIGHT)


def biased():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(),
        nn.Linear(108, 5), nn.BatchNorm1d(5), nn.Linear(5, 4),
    ]  # fmt: skip
    return nn.Sequential(*layers).double()


@pytest.mark.slow
@MESSAGES
@pytest.mark.parametrize("kind", ["fedavg", "dsgd"])
def test_a_bias_in_front_of_batch_norm_does_not_move(kind, shared_message):
    """The mean takes it out again, whatever it is."""
    task = task_of(
        "fedtan", create_algorithm(kind, lr=LR), model=biased(), shared_message=shared_message
    )
    before, after = task.initial_state.weights, last(task, ONE, 5).state.weights
    for name in ("0.bias", "4.bias"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-12)
    assert not torch.allclose(after["6.bias"], before["6.bias"], atol=1e-4)


def together(models, xs, ys, shares):
    """Return each client's gradient in a step whose statistics are exchanged, and what layers saw.

    All clients stand in one graph, each with its own copy of the weights. The gradient of the
    weighted sum of losses with respect to client i's copy is its share times its own gradient.
    """
    seen = {}
    for index, layer in enumerate(models[0]):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            axes, view = [0, *range(2, xs[0].dim())], (1, -1, *[1] * (xs[0].dim() - 2))
            mean = sum(w * x.mean(axes) for w, x in zip(shares, xs, strict=True))
            apart = [(x - mean.view(view)) ** 2 for x in xs]
            var = sum(w * a.mean(axes) for w, a in zip(shares, apart, strict=True))
            seen[str(index)] = [flat(x) for x in xs]
            xs = [
                (x - mean.view(view)) / (var.view(view) + layer.eps).sqrt()
                * own[index].weight.view(view) + own[index].bias.view(view)
                for x, own in zip(xs, models, strict=True)
            ]  # fmt: skip
        else:
            xs = [own[index](x) for x, own in zip(xs, models, strict=True)]
    losses = [functional.cross_entropy(x, y) for x, y in zip(xs, ys, strict=True)]
    sum(w * loss for w, loss in zip(shares, losses, strict=True)).backward()
    gradients = [[p.grad / w for p in m.parameters()] for w, m in zip(shares, models, strict=True)]
    return gradients, seen


def local_steps(model, steps):
    """Ordinary local BatchNorm; return what each layer saw in each step."""
    seen = {}
    for index, layer in enumerate(model):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            own = seen.setdefault(str(index), [])
            layer.register_forward_pre_hook(lambda _m, x, own=own: own.append(flat(x[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in steps:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return seen


def one_round(model, drawn):
    """Return the clients' models after one exchanged step and ordinary ones, and what they saw."""
    held = sum(b.examples for b in drawn)
    shares = [b.examples / held for b in drawn]
    models = [copy.deepcopy(model).train() for _ in drawn]
    xs, ys = ([b.steps[0][part] for b in drawn] for part in (0, 1))
    gradients, first = together(models, xs, ys, shares)
    seen = {path: [[x] for x in values] for path, values in first.items()}
    for number, (own, gradient) in enumerate(zip(models, gradients, strict=True)):
        with torch.no_grad():
            for p, g in zip(own.parameters(), gradient, strict=True):
                p.sub_(LR * g)
        later = local_steps(own, drawn[number].steps[1:])
        for path, steps in later.items():
            seen[path][number] += steps
    return models, shares, held, seen


def averaged(model, models, shares):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(sum(w * m.get_parameter(name) for w, m in zip(shares, models, strict=True)))


SEVERAL = Population(batch=(4, 7, 3), last=(2, 7, 4), absent={2: (1,)})


EQUAL = Population(batch=(4, 4, 4), holds=(4, 4, 4))
CASES = {"one step": ONE, "three steps": SEVERAL, "three steps of equal clients": EQUAL}


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_exchanged_and_the_others_are_ordinary(case):
    clients = CASES[case]
    state = last(
        task_of("fedtan", create_algorithm("fedavg", lr=LR), model=biased()), clients, 2
    ).state
    model = biased()
    running = {
        p: (m.running_mean, m.running_var) for p, m in model.named_modules() if p in "15" and p
    }
    for round_ in (1, 2):
        drawn = [clients.batches(c, round_) for c in clients.participants(round_)]
        models, shares, held, seen = one_round(model, drawn)
        averaged(model, models, shares)
        for path, steps in seen.items():
            values = steps[0][0].shape[1] // len(drawn[0].steps[0][0])
            weights = [share * held * values for share in shares]
            found = population(steps, weights, BETA)
            running[path] = follow(*running[path], found, 1 - (1 - BETA) ** len(steps[0]))
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)
    assert set(running) == set(state.running)
    for path, (mean, var) in running.items():
        torch.testing.assert_close(state.running[path].mean, mean, rtol=0, atol=TIGHT)
        torch.testing.assert_close(state.running[path].var, var, rtol=TIGHT, atol=TIGHT)


def test_averaged_statistics_are_the_authors():
    """Every client follows the exchanged moments once, then its own batches; all are averaged."""
    clients = EQUAL
    task = task_of(
        "fedtan", create_algorithm("fedavg", lr=LR), model=biased(), statistics="average"
    )
    state = last(task, clients, 1).state
    drawn = [clients.batches(c, 1) for c in range(3)]
    _, shares, held, seen = one_round(biased(), drawn)
    for path, steps in seen.items():
        values = steps[0][0].shape[1] // 4
        union = population([[own[0]] for own in steps], [w * held * values for w in shares], BETA)
        zero, one = torch.zeros_like(union[1]), torch.ones_like(union[1])
        means, variances = [], []
        for own in steps:
            # A client does not know how many values there are: it corrects by its own.
            seen_here = (own[0].shape[1], *union[1:])
            mean, var = follow(zero, one, seen_here, BETA)
            for x in own[1:]:
                found = (x.shape[1], x.mean(1), x.var(1, correction=0))
                mean, var = follow(mean, var, found, BETA)
            means.append(mean)
            variances.append(var)
        got = state.running[path]
        torch.testing.assert_close(got.mean, sum(means) / 3, rtol=0, atol=TIGHT)
        # In the exchanged step the authors correct by b/(b-1), b the samples of one client.
        torch.testing.assert_close(got.var, sum(variances) / 3, rtol=0, atol=TIGHT)


def test_the_two_oracles_agree():
    """Clients in one graph, averaged, are the weighted BatchNorm of one machine."""
    model, (other, _) = biased(), central(biased(), ONE, 1)
    models, shares, _, _ = one_round(model, [ONE.batches(c, 1) for c in range(3)])
    averaged(model, models, shares)
    for name, value in other.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sizes", [(5, 5), (2, 7)])
def test_the_weighted_oracle_is_torch_where_batches_weigh(sizes):
    """Where a client holds one batch, it is torch's own BatchNorm on the union."""
    clients = ToyClients(sizes=sizes)
    model, layers = central(nested_model(), clients, 2)
    plain = nested_model().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for round_ in (1, 2):
        x, y = clients.union(round_)
        optimizer.zero_grad()
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=1e-13)
    for path, layer in layers.items():
        torch.testing.assert_close(layer.var, plain.get_submodule(path).running_var)
