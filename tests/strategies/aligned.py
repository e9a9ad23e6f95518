"""Federated training by plain torch functions with BatchNorm layers as alignbn describes them.

Nothing here comes from the library: weights are dictionaries, a model says only which operations
follow each other, and every statistic is written out.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from populations import Population, flat

LR, TIGHT = 0.05, 1e-10


def wide(channels, u):
    """Return one number per channel in the shape of a layer's input."""
    return channels.view(1, -1, *[1] * (u.dim() - 2))


def normalize(u, eps, r, s):
    """Return r·(u-mean)/√(var+ε) + s, with mean and biased variance of this batch."""
    dims = [0, *range(2, u.dim())]
    mean = u.mean(dims, keepdim=True)
    var = ((u - mean) ** 2).mean(dims, keepdim=True)
    return wide(r, u) * (u - mean) / torch.sqrt(var + eps) + wide(s, u)


def scale_and_shift(x, own):
    """Apply γ and β, if there are any."""
    x = x * wide(own["weight"], x) if "weight" in own else x
    return x + wide(own["bias"], x) if "bias" in own else x


def place(own, shared, eps):
    """Return r and s: where a client's values are in the distribution of all clients' values."""
    (mean, var), (r_mean, r_var) = own, shared
    return ((var + eps) / (r_var + eps)).sqrt(), (mean - r_mean) / (r_var + eps).sqrt()


def follow(statistics, calls, start, end, momentum):
    """Let mean and variance follow the calls of a step in turn, as often as a counter moves."""
    mean, var = statistics
    for batch in range(start, end):
        new_mean, new_var = calls[(batch - start) % len(calls)]
        rate = 1 / (batch + 1) if momentum is None else momentum
        mean, var = (1 - rate) * mean + rate * new_mean, (1 - rate) * var + rate * new_var
    return mean, var


def average(calls, momentum):
    """Return what statistics follow that follow these calls again and again."""
    weights = [1 if momentum is None else (1 - momentum) ** c for c in reversed(range(len(calls)))]
    return [
        sum(w * x for w, x in zip(weights, part, strict=True)) / sum(weights)
        for part in zip(*calls, strict=True)
    ]


def pool(reports, weights):
    """Return mean and unbiased variance of clients by the law of total variance."""
    shares = [w / sum(weights) for w in weights]
    mean = sum(p * m for p, (_, m, _) in zip(shares, reports, strict=True))
    var = sum(p * (v + (m - mean) ** 2) for p, (_, m, v) in zip(shares, reports, strict=True))
    n = sum(count for count, _, _ in reports)
    return mean, var * n / (n - 1)


@dataclass
class Oracle:
    """The server and all clients; `order` are the paths of a model's modules as they are called."""

    model: nn.Module
    order: list
    lr: float
    by_batch: bool = False  # whether a client weighs its batch, as under dsgd
    # client -> layer -> own statistics, moments of its last first step, and counter at that time
    kept: dict = field(default_factory=dict)

    def __post_init__(self):
        self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        norms = {p: m for p, m in self.model.named_modules() if isinstance(m, _BatchNorm)}
        self.shared = {p: (m.running_mean.clone(), m.running_var.clone()) for p, m in norms.items()}
        self.layers = {p: m for p, m in norms.items() if m.training}  # others are frozen
        self.counter = dict.fromkeys(norms, 0)

    def forward(self, weights, x, placed, seen):
        """Return the model's output; `seen` takes the inputs of its normalization layers."""
        for path in self.order:
            layer = self.model.get_submodule(path)
            own = {name: weights[f"{path}.{name}"] for name, _ in layer.named_parameters()}
            if path in self.layers:
                seen.setdefault(path, []).append(flat(x))
                x = scale_and_shift(normalize(x, layer.eps, *placed[path]), own)
            elif path in self.shared:
                mean, var = (wide(part, x) for part in self.shared[path])
                x = scale_and_shift((x - mean) / torch.sqrt(var + layer.eps), own)
            else:
                x = functional_call(layer, own, x)
        return x

    def own(self, client):
        """Return a client's statistics by layer, as old as the shared ones."""
        kept = self.kept.get(client, {p: (self.shared[p], [], n) for p, n in self.counter.items()})
        return {
            p: follow(*kept[p], self.counter[p], layer.momentum) for p, layer in self.layers.items()
        }

    def placed(self, client):
        """Return r and s of a client's layers in a round that starts now."""
        own = self.own(client)
        return {p: place(own[p], self.shared[p], m.eps) for p, m in self.layers.items()}

    def train(self, client, steps):
        """Return a client's weights after a round and its first batch's moments by layer."""
        weights, placed, own, report = self.weights, self.placed(client), self.own(client), {}
        for step, (x, y) in enumerate(steps):
            weights, seen = {n: w.clone().requires_grad_() for n, w in weights.items()}, {}
            loss = functional.cross_entropy(self.forward(weights, x, placed, seen), y)
            grads = torch.autograd.grad(loss, list(weights.values()))
            moved = zip(weights.items(), grads, strict=True)
            weights = {n: (w - self.lr * g).detach() for (n, w), g in moved}
            if step == 0:
                report = {
                    p: [(u.shape[1], u.mean(1), u.var(1, correction=0)) for u in inputs]
                    for p, inputs in seen.items()
                }
        self.kept[client] = {
            p: (own[p], [(m, v) for _, m, v in calls], self.counter[p])
            for p, calls in report.items()
        }
        return weights, report

    def round(self, clients, number):
        """Run a round of these clients."""
        batches = [clients.batches(c, number) for c in clients.participants(number)]
        results = [self.train(b.client, b.steps) for b in batches]
        sizes = [len(b.steps[0][1]) for b in batches]
        examples = sizes if self.by_batch else [b.examples for b in batches]
        self.weights = {
            name: sum(e * w[name] for e, (w, _) in zip(examples, results, strict=True))
            / sum(examples)
            for name in self.weights
        }
        steps = max(len(b.steps) for b in batches)
        for path, layer in self.layers.items():
            calls, before = [], self.counter[path]
            for reports in zip(*(report[path] for _, report in results), strict=True):
                parts = zip(examples, sizes, reports, strict=True)
                calls.append(pool(reports, [e * count / b for e, b, (count, _, _) in parts]))
            self.counter[path] += steps * len(calls)
            self.shared[path] = follow(
                self.shared[path], calls, before, self.counter[path], layer.momentum
            )

    @torch.no_grad()
    def calibrate(self, batches):
        """Return mean and unbiased variance of all that layers see when clients pass their data."""
        seen = {}
        for own in batches:
            for x, _ in own.steps:
                self.forward(self.weights, x, self.placed(own.client), seen)
        together = {path: torch.cat(inputs, 1) for path, inputs in seen.items()}
        return {path: (u.mean(1), u.var(1, correction=1)) for path, u in together.items()}

    def tested(self, batches):
        """Fill the plain model for evaluation after a calibration."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.weights[name])
            for path, (mean, var) in self.calibrate(batches).items():
                self.layers[path].running_mean.copy_(mean)
                self.layers[path].running_var.copy_(var)
        return self.model.eval()


def make_oracle(model, lr=LR, **fields):
    order = getattr(model, "order", None) or [name for name, _ in model.named_children()]
    return Oracle(copy.deepcopy(model), list(order), lr, **fields)


def conv_net(momentum=0.1, **fields):
    """Convolution, BatchNorm, ReLU, twice."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=momentum, **fields), nn.ReLU(),
        nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, momentum=momentum, **fields), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, 4),
    ).double()  # fmt: skip


def dense_net(momentum=0.1, **fields):
    """Linear, ReLU, BatchNorm, twice."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.BatchNorm1d(5, momentum=momentum, **fields),
        nn.Linear(5, 4), nn.ReLU(), nn.BatchNorm1d(4, momentum=momentum, **fields), nn.Linear(4, 4),
    ).double()  # fmt: skip


class Twice(nn.Module):
    """One layer in two places, the second of which sees other values, and fewer of them."""

    order = ("first", "norm", "relu", "second", "norm", "relu", "flatten", "last")

    def __init__(self, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3)
        self.norm, self.relu = nn.BatchNorm2d(3, momentum=momentum), nn.ReLU()
        self.flatten, self.last = nn.Flatten(), nn.Linear(48, 4)
        with torch.no_grad():
            self.second.bias.fill_(5.0)  # far from what the first call sees
        self.double()

    def forward(self, x):
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


def half_frozen(momentum=0.1):
    """The first BatchNorm layer in evaluation mode, with other statistics than 0 and 1."""
    model = conv_net(momentum)
    model[1].eval()
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model


def spread(model):
    """Return the model with γ and β that are not 1 and 0."""
    torch.manual_seed(3)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.uniform_(layer.bias, -1, 1)
    return model


MODELS = {
    "conv": conv_net,
    "dense": dense_net,
    "twice": Twice,
    "frozen": half_frozen,
    "not affine": lambda momentum: conv_net(momentum, affine=False),
}


def away(steps, batch=(4, 7, 3, 5), last=(2, 3, 3, 4)):
    """Four unequal clients: one is away for two rounds, one joins in round 3."""
    many = (steps,) * 4 if isinstance(steps, int) else steps
    return Population(
        holds=(40, 9, 24, 15), batch=batch, steps=many, shapes=((1, 8, 8),) * 4,
        last=() if 1 in many else last, absent={1: (3,), 2: (0, 3), 3: (0,)},
    )  # fmt: skip
