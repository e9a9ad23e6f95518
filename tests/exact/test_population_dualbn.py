"""dualbn's shared statistics, forward and backward, are those of the population.

The oracle is plain torch: layers that normalise with given r and v, a hook that subtracts the
shared means p and q from the gradient, and moments of all values that passed.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from populations import Population, flat, follow, population
from support import last, nested_model, task_of

LR, BETA, TIGHT = 0.05, 0.1, 1e-11


class Dual(nn.Module):
    """BatchNorm with shared statistics forward (r, v) and shared means backward (p, q)."""

    def __init__(self, plain):
        super().__init__()
        self.weight, self.bias, self.eps = plain.weight, plain.bias, plain.eps
        self.r, self.v = plain.running_mean, plain.running_var
        self.p, self.q = torch.zeros_like(self.r), torch.zeros_like(self.r)
        self.seen, self.back = [], []

    def forward(self, u):
        def wide(c):
            return c.view(1, -1, *[1] * (u.dim() - 2))

        b = len(u)
        normal = (u - wide(self.r)) / wide(self.v + self.eps).sqrt()
        out = normal * wide(self.weight) + wide(self.bias)
        if torch.is_grad_enabled():
            fixed, gamma, p, q = (
                normal.detach(),
                wide(self.weight.detach()),
                wide(self.p),
                wide(self.q),
            )
            normal.register_hook(lambda g: g - gamma * (p / b + fixed * q / b))
            out.register_hook(lambda dy: self.back.append((flat(b * dy), flat(b * dy * fixed))))
            self.seen.append(flat(u))
        return out


class Standard(nn.Module):
    """A convolution whose weights have, per output channel, mean 0 and variance 1/fan_in."""

    def __init__(self, plain):
        super().__init__()
        self.weight, self.stride, self.padding = plain.weight, plain.stride, plain.padding

    def forward(self, x):
        w = self.weight.flatten(1)
        spread = w.var(1, correction=0, keepdim=True) * w.shape[1] + 1e-6
        w = ((w - w.mean(1, keepdim=True)) / spread.sqrt()).view_as(self.weight)
        return functional.conv2d(x, w, None, self.stride, self.padding)


def swap(model, kind, made):
    for path, layer in list(model.named_modules()):
        if isinstance(layer, kind):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made(layer))
    return model


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def set_parameters(model, values):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def train_locally(model, layers, steps):
    """Train by plain SGD; return the weights, and what layers saw forward and backward."""
    for layer in layers.values():
        layer.seen, layer.back = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in steps:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return copies(model), {path: (m.seen, m.back) for path, m in layers.items()}


def update(layer, reports, total):
    """Let r, v, p, q follow the population, in which client i weighs `total[i]`."""
    seen = [forward for forward, _ in reports]
    share = 1 - (1 - BETA) ** len(seen[0])
    layer.r, layer.v = follow(layer.r, layer.v, population(seen, total, BETA), share)
    for name, part in (("p", 0), ("q", 1)):
        back = [[step[part] for step in backward] for _, backward in reports]
        mean = population(back, total, BETA)[1]
        setattr(layer, name, (1 - share) * getattr(layer, name) + share * mean)


def dual_rounds(clients, rounds, *, standardized, by_batch):
    model = swap(nested_model(), nn.BatchNorm2d, Dual)
    if standardized:
        swap(model, nn.Conv2d, Standard)
    layers = {p: m for p, m in model.named_modules() if isinstance(m, Dual)}
    for round_ in range(1, rounds + 1):
        start, replies, weights, sizes = copies(model), [], [], []
        for client in clients.participants(round_):
            set_parameters(model, start)
            batches = clients.batches(client, round_)
            replies.append(train_locally(model, layers, batches.steps))
            sizes.append(len(batches.steps[0][0]))
            weights.append(sizes[-1] if by_batch else batches.examples)
        moved = {
            name: sum(w * new[name] for w, (new, _) in zip(weights, replies, strict=True))
            / sum(weights)
            for name in start
        }
        set_parameters(model, moved)
        for path, layer in layers.items():
            reports = [report[path] for _, report in replies]
            per_example = [
                seen[0].shape[1] // b for (seen, _), b in zip(reports, sizes, strict=True)
            ]
            update(layer, reports, [w * k for w, k in zip(weights, per_example, strict=True)])
    return model, layers


CASES = {
    "fedavg": Population(batch=(4, 7, 3), absent={2: (1,)}),
    "fedavg, one batch held": Population(holds=(4, 7, 3), batch=(4, 7, 3), absent={2: (1,)}),
    "dsgd": Population(batch=(4, 7, 3), steps=(1, 1, 1), absent={2: (1,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("standardized", [False, True])
def test_dualbn_forward_and_backward(case, standardized):
    clients, kind = CASES[case], case.partition(",")[0]
    task = task_of(
        "dualbn", create_algorithm(kind, lr=LR, warmup=0), weight_standardization=standardized
    )
    state = last(task, clients, 3).state
    by_batch = kind == "dsgd"
    model, layers = dual_rounds(clients, 3, standardized=standardized, by_batch=by_batch)
    for path, layer in layers.items():
        got, back = state.running[path], state.running[f"{path}.backward_means"]
        torch.testing.assert_close(got.mean, layer.r, rtol=0, atol=TIGHT)
        torch.testing.assert_close(got.var, layer.v, rtol=TIGHT, atol=TIGHT)
        torch.testing.assert_close(back.mean, torch.stack([layer.p, layer.q]), rtol=0, atol=TIGHT)
        assert back.mean.abs().max() > 1e-6
    for name, value in model.named_parameters():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)
