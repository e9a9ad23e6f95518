"""What both sides of a round agree on before the first one: model, strategy, algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from fednorm.core.aggregator import Aggregator, weighted_mean
from fednorm.core.algorithm import Algorithm, Loss
from fednorm.core.layer import NormLayer
from fednorm.core.layout import Layout, layout
from fednorm.core.messages import Broadcast, Memory, Running, ServerState
from fednorm.core.strategy import NormStrategy, Replacement
from fednorm.core.types import Clip, Tensors

Precision: TypeAlias = Literal["full", "bf16"]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Task:
    """A converted model under a strategy and an algorithm.

    The model is a workspace: every round overwrites its tensors in place with what it is given.
    """

    model: nn.Module
    strategy: NormStrategy
    algorithm: Algorithm
    loss: Loss
    aggregate: Aggregator
    aggregate_statistics: Aggregator
    rounds: int | None
    precision: Precision
    layout: Layout
    replaced: tuple[Replacement, ...]
    initial_state: ServerState
    initial_memory: Memory  # of a client that has not trained yet
    rates: Mapping[str, float]  # of parameters, as in `Work`
    clips: Mapping[str, Clip]  # as well

    @classmethod
    def build(  # noqa: PLR0913 (one argument for each independent axis)
        cls,
        model: nn.Module,
        strategy: NormStrategy,
        algorithm: Algorithm,
        *,
        rounds: int | None = None,
        loss: Loss = nn.functional.cross_entropy,
        aggregate: Aggregator = weighted_mean,
        aggregate_statistics: Aggregator = weighted_mean,
        precision: Precision = "full",
    ) -> "Task":
        """Convert a copy of `model` for `strategy` and read the initial state off it."""
        conversion = strategy.convert(model)
        tensors = layout(conversion.model, strategy.role)
        return cls(
            model=conversion.model,
            strategy=strategy,
            algorithm=algorithm,
            loss=loss,
            aggregate=aggregate,
            aggregate_statistics=aggregate_statistics,
            rounds=rounds,
            precision=precision,
            layout=tensors,
            replaced=conversion.replaced,
            initial_state=read_state(tensors),
            initial_memory=Memory(tensors=snapshot(tensors.personal)),
            rates=_by_name(conversion.model, strategy.rates(conversion.model)),
            clips=_by_name(conversion.model, strategy.clips(conversion.model)),
        )


def _by_name(model: nn.Module, values: Mapping[nn.Parameter, _Value]) -> dict[str, _Value]:
    return {name: values[p] for name, p in model.named_parameters() if p in values}


def snapshot(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies that later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _running(layer: NormLayer) -> Running:
    running = layer.running()
    assert running is not None, "only layers that track statistics share them"  # noqa: S101
    return running


def read_state(tensors: Layout) -> ServerState:
    """Return the shared part of a model as the server's state before the first round."""
    return ServerState(
        round=0,
        weights=snapshot(tensors.shared),
        buffers=snapshot(tensors.buffers),
        running={path: _running(layer) for path, layer in tensors.sharing.items()},
    )


def load(task: Task, received: ServerState | Broadcast, memory: Memory) -> None:
    """Overwrite the workspace with the shared state and one client's personal tensors."""
    tensors = task.layout
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for live, new in (
        (tensors.shared, received.weights),
        (tensors.buffers, received.buffers),
        (tensors.personal, memory.tensors or task.initial_memory.tensors),
    ):
        targets += live.values()
        sources += (new[name] for name in live)
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
    for path, layer in tensors.sharing.items():
        layer.load(received.running[path])


def export(task: Task, state: ServerState, memory: Memory | None = None) -> nn.Module:
    """Return the workspace model as it stands after a round, for evaluation or for saving.

    With a client's memory it is that client's personal model.
    """
    load(task, state, memory or Memory())
    return task.model.eval()
