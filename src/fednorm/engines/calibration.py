"""Calibrate a finished model: the statistics of its BatchNorm layers, pooled over clients.

The repair for a model that was trained with plain FedAvg, by any framework: its averaged running
variances lack the variance between clients, and its statistics belong to no model, because each
client's followed weights that were averaged afterwards.

Statistics of a layer are right for what the layers before it put out. With `exact`, all layers
normalise with the pooled statistics of the pass before: after pass n those of every layer that has
fewer than n BatchNorm layers before it are what one machine computes that has all data in one
batch. Without it there is one pass, in which each batch is normalised by itself as in training.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from fednorm.algorithms import create_algorithm
from fednorm.core.layer import NormLayer, NormRule
from fednorm.core.messages import Batches, ClientState, Reply, RunningStats, ServerState
from fednorm.core.moments import pool
from fednorm.core.round import broadcast, client_calibration, server_calibration
from fednorm.core.strategy import Conversion, MergeInput, pool_statistics
from fednorm.core.task import Task
from fednorm.nn import rules
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.nn.copies import copy_model
from fednorm.strategies.base import BatchNormStrategy


def calibrate(
    model: nn.Module,
    loaders: Mapping[Any, Iterable[Any]] | Iterable[Iterable[Any]],
    *,
    exact: bool = True,
    weights: Literal["examples", "equal"] = "examples",
) -> nn.Module:
    """Return a copy of a model whose BatchNorm statistics are pooled over the clients' data.

    Weights stay as they are. All layers but BatchNorm are in evaluation mode while the data pass;
    a BatchNorm layer that is frozen (in evaluation mode, in a model in training mode) keeps its
    statistics. A layer that is used several times gets the moments of all its inputs.

    Args:
        model: any model with BatchNorm layers that track statistics.
        loaders: for each client its batches, `x` or `(x, ...)`, such as a DataLoader; or a mapping
            from clients to them. A client without batches is left out.
        exact: pass the data once for every layer, so that the statistics are those of one machine
            with all data in one batch. Otherwise once, each batch normalised by itself.
        weights: of clients: by their "examples", or all "equal".

    >>> data = [[torch.tensor([[0.0], [2.0]])], [torch.tensor([[4.0], [6.0]])]]
    >>> repaired = calibrate(nn.BatchNorm1d(1), data)
    >>> repaired.running_mean, repaired.running_var
    (tensor([3.]), tensor([6.6667]))
    """
    if weights not in ("examples", "equal"):
        raise ValueError(f"weights must be 'examples' or 'equal', not {weights!r}.")
    task = _build_task(model, _Calibration(exact=exact))
    if not task.layout.sharing:
        raise ValueError(
            f"{type(model).__name__} has no BatchNorm layer with running statistics to calibrate."
        )
    clients = _Clients(_name_loaders(loaders), equal=weights == "equal")
    state = task.initial_state
    for _ in range(len(task.layout.sharing) if exact else 1):
        replies = clients.measure(task, state)
        before, state = state, clients.adopt(task, state, replies)
        if _are_equal(before, state):
            break
    finished = replace(task, strategy=_Calibration(exact=exact, finished=True))
    return _copy_with(model, clients.adopt(finished, state, replies))


@dataclass(frozen=True)
class _Calibration(BatchNormStrategy):
    """Pooled statistics; between the passes with the biased variance, as a batch has it."""

    exact: bool
    finished: bool = False

    def convert(self, model: nn.Module) -> Conversion:
        return to_fed_batch_norm(model)

    def calibration_rule(self) -> NormRule:
        return rules.calibrate_shared if self.exact else rules.calibrate_batch

    def adopt(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        if self.finished:
            return pool_statistics(merge)
        pooled = pool([report.moments for report in merge.reports], merge.aggregator)
        return RunningStats(pooled.mean, pooled.var, previous.num_batches)


def _build_task(model: nn.Module, strategy: _Calibration) -> Task:
    # All data are the caller's: whatever they are, they count.
    task = Task.build(model, strategy, create_algorithm("fedavg"), outlier_factor=0.0)
    # Evaluation has no dropout, so statistics for it have none either.
    others = {path for path, m in task.model.named_modules() if not isinstance(m, NormLayer)}
    return replace(task, frozen=task.frozen | others)


def _name_loaders(
    loaders: Mapping[Any, Iterable[Any]] | Iterable[Iterable[Any]],
) -> dict[str, Iterable[Any]]:
    if isinstance(loaders, DataLoader | Tensor):
        raise TypeError(
            "loaders must hold one iterable of batches for each client, but is a single "
            f"{type(loaders).__name__}; pass a list of them."
        )
    named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
    return {str(name): own for name, own in named}


@dataclass(slots=True)
class _Inputs:
    """The inputs in a client's batches, on a device; iterating counts them."""

    client: str
    batches: Iterable[Any]
    device: torch.device
    examples: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.examples = 0
        for batch in self.batches:
            x = batch[0] if isinstance(batch, tuple | list) and batch else batch
            if not (isinstance(x, Tensor) and x.dim()):
                raise TypeError(
                    f"a batch must be a tensor of inputs, or a tuple that begins with one, but "
                    f"client {self.client} has one of {type(batch).__name__}."
                )
            self.examples += len(x)
            yield x.to(self.device), x


@dataclass
class _Clients:
    """The clients of a calibration, by name, and how many examples each was found to hold."""

    loaders: Mapping[str, Iterable[Any]]
    equal: bool
    found: dict[str, int] = field(default_factory=dict)

    def measure(self, task: Task, state: ServerState) -> list[Reply]:
        """Pass each client's data through the model; return what the layers saw."""
        received, rule = broadcast(task, state), task.strategy.calibration_rule()
        device = next(iter(state.running.values())).mean.device
        replies = []
        for number, (client, batches) in enumerate(self.loaders.items()):
            inputs = _Inputs(client, batches, device)
            own = Batches(number, inputs, examples=1)
            seen = client_calibration(task, received, ClientState(), own, rule)
            self._check_again(client, inputs.examples)
            if inputs.examples:
                replies.append(seen if self.equal else replace(seen, examples=inputs.examples))
        if not replies:
            raise ValueError("no client has a batch; a calibration needs data.")
        return replies

    def _check_again(self, client: str, examples: int) -> None:
        before = self.found.setdefault(client, examples)
        if before != examples:
            raise ValueError(
                f"the batches of client {client} held {before} examples at first and {examples} "
                "in the next pass; pass a list or a DataLoader without drop_last, which can be "
                "iterated over again, or exact=False."
            )

    def adopt(self, task: Task, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Return the state with the pooled statistics; raise if a client's are unusable."""
        after = server_calibration(task, state, replies)
        for bad in after.rejected:
            name = list(self.loaders)[bad.client]
            raise ValueError(f"the statistics of client {name} cannot be pooled: {bad.reason}.")
        return after


def _are_equal(one: ServerState, other: ServerState) -> bool:
    return all(
        torch.equal(one.running[path].mean, r.mean) and torch.equal(one.running[path].var, r.var)
        for path, r in other.running.items()
    )


@torch.no_grad()
def _copy_with(model: nn.Module, state: ServerState) -> nn.Module:
    """Return a copy of a model with the running statistics of `state`."""
    copied = copy_model(model)
    for path, running in state.running.items():
        layer = copied.get_submodule(path)
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            layer.load_state_dict(
                {
                    **layer.state_dict(),
                    "running_mean": running.mean,
                    "running_var": running.var,
                    "num_batches_tracked": torch.tensor(running.num_batches),
                }
            )
    return copied
