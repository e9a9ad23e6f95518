"""The task that clients and server agree on before the first round: model, strategy, algorithm.

A module that the user put into evaluation mode, in a model that is in training mode, is frozen: it
stays in evaluation mode while the others train. A frozen BatchNorm layer normalises with its
running statistics, which do not change, and reports nothing; γ and β learn unless `requires_grad`
is off, as in torch. A frozen dropout layer drops nothing. In a model that is in evaluation mode
itself nothing is frozen: it was tested before, and trains as after `model.train()`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fednorm.core.aggregation import Aggregator, weighted_mean
from fednorm.core.algorithm import Algorithm, Loss
from fednorm.core.layer import NormLayer
from fednorm.core.layout import Layout, find_layout
from fednorm.core.messages import ClientState, RunningStats, ServerState
from fednorm.core.replies.privacy import Privacy, refuse_leaks
from fednorm.core.strategy import Replacement, Strategy
from fednorm.core.targets import DEFAULT_METRICS, Metrics
from fednorm.core.types import Clip, Tensors

# More than honest clients ever differ by: benchmarks/honest_margin.py prints by how much they do.
OUTLIER_FACTOR = 10_000.0
Precision: TypeAlias = Literal["full", "bf16"]
_MODAL = (_NormBase, _DropoutNd)  # torch's modules that do something else in evaluation mode
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Task:
    """A converted model under a strategy and an algorithm.

    The model is a workspace: every round overwrites its tensors in place.

    >>> import fednorm
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> strategy, algorithm = fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    >>> sorted(Task.build(model, strategy, algorithm).initial_state.weights)
    ['0.bias', '0.weight', '1.bias', '1.weight']
    """

    model: nn.Module
    strategy: Strategy
    algorithm: Algorithm
    loss: Loss
    aggregator: Aggregator
    statistics_aggregator: Aggregator
    rounds: int | None
    precision: Precision
    layout: Layout
    replaced: tuple[Replacement, ...]
    conversion_notes: tuple[str, ...]  # what was replaced, dropped and skipped, in words
    initial_state: ServerState
    initial_client_state: ClientState  # of a client that has not trained yet
    rates: Mapping[str, float]  # of parameters, as in `LocalWork`
    clips: Mapping[str, Clip]  # as in `LocalWork`
    frozen: frozenset[str] = frozenset()  # modules that never are in training mode, by path
    # A reply of which something is this many times the median over clients is rejected; 0: none.
    outlier_factor: float = OUTLIER_FACTOR
    secure: bool = False  # the server sees sums over clients alone
    privacy: Privacy | None = None  # with which outliers are clipped instead
    clients: int | None = None  # that may be asked; None: all are, in every round
    metrics: Metrics = DEFAULT_METRICS  # of a test

    @classmethod
    def build(  # noqa: PLR0913 (one argument for each independent axis)
        cls,
        model: nn.Module,
        strategy: Strategy,
        algorithm: Algorithm,
        *,
        rounds: int | None = None,
        loss: Loss = nn.functional.cross_entropy,
        aggregator: Aggregator = weighted_mean,
        statistics_aggregator: Aggregator = weighted_mean,
        precision: Precision = "full",
        outlier_factor: float = OUTLIER_FACTOR,
        secure: bool = False,
        privacy: Privacy | None = None,
        clients: int | None = None,
        metrics: Metrics = DEFAULT_METRICS,
    ) -> "Task":
        """Convert a copy of `model` for `strategy` and read the initial state off it.

        Modules in evaluation mode, in a model in training mode, stay so: they are frozen.
        """
        conversion = strategy.convert(model)
        tensors = find_layout(conversion.model, strategy.role)
        if privacy and secure:
            raise ValueError("a secure sum cannot be clipped client by client; drop one of them.")
        if privacy:
            refuse_leaks(strategy, algorithm, tensors, (aggregator, statistics_aggregator))
        return cls(
            model=conversion.model,
            strategy=strategy,
            algorithm=algorithm,
            loss=loss,
            aggregator=aggregator,
            statistics_aggregator=statistics_aggregator,
            rounds=rounds,
            precision=precision,
            layout=tensors,
            replaced=conversion.replaced,
            conversion_notes=tuple(conversion.describe()),
            initial_state=read_state(tensors),
            initial_client_state=ClientState(tensors=snapshot(tensors.personal)),
            rates=_by_name(conversion.model, strategy.rates(conversion.model)),
            clips=_by_name(conversion.model, strategy.clips(conversion.model)),
            frozen=_find_frozen(model, conversion.model),
            outlier_factor=outlier_factor,
            secure=secure,
            privacy=privacy,
            clients=clients,
            metrics=metrics,
        )


def _find_frozen(model: nn.Module, converted: nn.Module) -> frozenset[str]:
    """Return the modules of the converted model that the user has put into evaluation mode."""
    if model.training:
        frozen = {path for path, m in converted.named_modules() if not m.training}
        converted.train()  # a model may freeze layers by itself whenever it is called
        frozen |= {path for path, m in converted.named_modules() if not m.training}
        keep_frozen(converted, frozen)
        return frozenset(frozen)
    for path, module in model.named_modules():
        if module.training and isinstance(module, _MODAL):
            raise ValueError(
                f"the model is in evaluation mode, but its layer {path!r} "
                f"({type(module).__name__}) is in training mode, so that it is not clear which "
                "layers are frozen; call .train() on the model, then .eval() on those."
            )
    return frozenset()


def _by_name(model: nn.Module, values: Mapping[nn.Parameter, _Value]) -> dict[str, _Value]:
    return {name: values[p] for name, p in model.named_parameters() if p in values}


def snapshot(tensors: Tensors) -> dict[str, Tensor]:
    """Return detached copies, which later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _read_running(layer: NormLayer) -> RunningStats:
    running = layer.read_running()
    assert running is not None, "only layers that track statistics share them"  # noqa: S101
    return running


def read_state(tensors: Layout) -> ServerState:
    """Return the shared part of a model as the server's state before the first round."""
    return ServerState(
        round=0,
        weights=snapshot(tensors.shared),
        buffers=snapshot(tensors.buffers),
        running={path: _read_running(layer) for path, layer in tensors.sharing.items()},
    )


def select_reporting(task: Task, state: ServerState) -> dict[str, RunningStats]:
    """Return the running statistics of the layers that may report: of all that are not frozen."""
    return {path: r for path, r in state.running.items() if path not in task.frozen}


def load_state(task: Task, state: ServerState, client_state: ClientState) -> None:
    """Overwrite the workspace with the shared state and one client's personal tensors."""
    tensors = task.layout
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for live, new in (
        (tensors.shared, state.weights),
        (tensors.buffers, state.buffers),
        (tensors.personal, client_state.tensors or task.initial_client_state.tensors),
    ):
        targets += live.values()
        sources += (new[name] for name in live)
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
    for path, layer in tensors.sharing.items():
        layer.load_running(state.running[path])


def start_training(task: Task) -> None:
    """Put the workspace into training mode, except modules that the user froze."""
    if not task.model.training:
        task.model.train()
    keep_frozen(task.model, task.frozen)


def keep_frozen(model: nn.Module, frozen: Collection[str]) -> None:
    """Put frozen modules, which are named by their paths, back into evaluation mode."""
    for path in frozen:
        # Not `.eval()`, which would take along a child that the user left in training mode.
        model.get_submodule(path).training = False


def export(task: Task, state: ServerState, client_state: ClientState | None = None) -> nn.Module:
    """Return the workspace model as it stands after a round, for evaluation or for saving.

    With a client's state it is that client's personal model.

    >>> import fednorm
    >>> task = Task.build(
    ...     nn.BatchNorm1d(2), fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    ... )
    >>> export(task, task.initial_state).training
    False
    """
    load_state(task, state, client_state or ClientState())
    return task.model.eval()


@contextmanager
def isolated_rng(
    seed: int | None = None, at: nn.Module | torch.device | None = None
) -> Iterator[None]:
    """Isolate random draws: the generators are the caller's again afterwards.

    With a `seed` draws start from it. `at` is the device, or a model on it, whose generator is
    isolated as well as the CPU's; by default all are.
    """
    if at is None:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            if seed is not None:
                torch.manual_seed(seed)
            yield
        return
    device = next(at.parameters()).device if isinstance(at, nn.Module) else at
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes as long as a step
            if devices:
                torch.get_device_module(device).manual_seed(seed)
        yield
