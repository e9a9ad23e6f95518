"""Fixup: no normalization; a residual network that starts as its shortcuts.

Zhang, Dauphin and Ma, "Fixup Initialization", ICLR 2019, arXiv:1901.09321.

Client: trains the model with a scalar bias instead of each BatchNorm layer, and a scalar multiplier
as well instead of the last one of each residual branch. As in the authors' code, scalars, whose
gradients are sums over all positions, learn and decay at a tenth of the rate.

Server: averages everything. Before the first round the classifier and the last layer of each
residual branch are set to 0; the other layers are scaled to He's standard deviation √(2/fan_in),
and those of a branch by L^(-1/(2m-2)) as well, for L branches and m layers in the branch.

Residual branches are found by structure, in the graph of torch.fx: where two tensors are added that
come from one, each by a plain chain of operations, one chain with two convolutions or linear layers
at least, the other with one at most (the shortcut). A model that cannot be traced is searched part
by part. The classifier is the linear layer outside the branches that the model registers last.

Deviations: biases are where BatchNorm was, shortcuts included, none right before a convolution;
the classifier's bias learns at the full rate (their code: a tenth); fan-in (their code: fan-out).
"""

import copy
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fednorm.core.strategy import Conversion, Strategy
from fednorm.errors import ConversionError
from fednorm.nn.convert import replace
from fednorm.strategies.base import require_batch_norm

_LAYERS = (_ConvNd, nn.Linear)
_ADDITIONS = {operator.add, torch.add, "add", "add_"}


class ScalarAffine(nn.Module):
    """Adds a scalar; with a `scale`, multiplies by that first."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None  # set in the last layer of a branch
        self.bias = nn.Parameter(like.new_zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and shifted input."""
        return (x if self.scale is None else x * self.scale) + self.bias


@dataclass(frozen=True)
class Fixup(Strategy):
    """No normalization; residual branches that start at 0, scalar biases and multipliers."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with scalars instead of BatchNorm, initialised as in the paper."""

        def make(_: str, layer: _BatchNorm) -> nn.Module:
            return ScalarAffine(layer.weight if layer.affine else next(model.parameters()))

        conversion = require_batch_norm(replace(model, make), self, model)
        _initialize(conversion.model)
        return conversion

    def rates(self, model: nn.Module) -> Mapping[nn.Parameter, float]:
        """Return the factor of the scalars."""
        return {p: 0.1 for m in model.modules() if type(m) is ScalarAffine for p in m.parameters()}


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    branches = [[model.get_submodule(path) for path in b] for b in find_residual_branches(model)]
    factors: dict[nn.Module, float] = {}  # a layer that is used twice is scaled once
    for branch in branches:
        *others, last = [m for m in branch if isinstance(m, _LAYERS)]
        factors |= dict.fromkeys(others, len(branches) ** (-1 / (2 * len(others)))) | {last: 0.0}
        for norm in [m for m in branch if isinstance(m, ScalarAffine)][-1:]:
            norm.scale = nn.Parameter(torch.ones_like(norm.bias))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in factors]
    if not linear:
        raise ConversionError(
            f"Fixup needs a linear classifier, but {type(model).__name__} has no nn.Linear outside "
            "its residual branches; end the model in one."
        )
    factors[linear[-1]] = 0.0
    for layer in (m for m in model.modules() if isinstance(m, _LAYERS)):
        weight, factor = layer.get_parameter("weight"), factors.get(layer, 1.0)
        size = weight.square().mean().sqrt().clamp_min(1e-12)  # a layer of zeros stays one
        weight.mul_(factor * math.sqrt(2 / weight[0].numel()) / size)
        if factor == 0 and layer.bias is not None:
            layer.bias.zero_()


def find_residual_branches(model: nn.Module) -> list[list[str]]:
    """Return the paths of the modules on each residual branch, in the order of computation."""

    def layers(side: list[str]) -> int:
        return sum(isinstance(model.get_submodule(path), _LAYERS) for path in side)

    graphs = _trace_graphs(copy.deepcopy(model), "")  # a forward pass may keep what it is given
    pairs = [sorted(pair, key=layers) for graph in graphs for pair in _sides(*graph)]
    branches = [more for less, more in pairs if layers(less) <= 1 < layers(more)]
    if not branches:
        raise ConversionError(
            f"Fixup needs residual branches, but none was found in {type(model).__name__}: no sum "
            "of a tensor and a plain chain of two or more convolutions or linear layers from it; "
            "choose 'fedwon' or 'none'."
        )
    return branches


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return isinstance(m, (ScalarAffine, *_LAYERS)) or super().is_leaf_module(m, path)


def _trace_graphs(model: nn.Module, prefix: str) -> Iterator[tuple[str, fx.Graph]]:
    """Yield the graph of a model with the model's path, or those of its parts."""
    try:
        graph = _Tracer().trace(model)
    except Exception:  # noqa: BLE001 (a user's forward pass may fail in any way on symbols)
        for name, child in model.named_children():
            yield from _trace_graphs(child, f"{prefix}{name}.")
    else:
        yield prefix, graph


def _sides(prefix: str, graph: fx.Graph) -> Iterator[list[list[str]]]:
    """Yield, for each sum, the modules on the two chains from where they split to the sum."""
    for node in graph.nodes:
        called = node.op in ("call_function", "call_method") and node.target in _ADDITIONS
        chains = [_chain(operand) for operand in node.all_input_nodes] if called else []
        if len(chains) == 2 and (common := [n for n in chains[0] if n in chains[1]]):  # noqa: PLR2004 (operands)
            parts = [reversed(chain[: chain.index(common[0])]) for chain in chains]
            yield [[f"{prefix}{n.target}" for n in p if n.op == "call_module"] for p in parts]


def _chain(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it comes from, back to one with no input or several."""
    chain = [node]
    while len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain
