"""Try an engine on a few clients before a run, in double precision, against the loop.

An engine that trains several clients at once is exact for models that treat samples independently
and keep nothing outside their modules. Whether a user's model does so, only a trial can tell.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from fednorm.core.layout import find_layout
from fednorm.core.messages import Batches, ClientState, Reply
from fednorm.core.task import Task, load_state, read_state, snapshot
from fednorm.core.types import ClientId, Tensors
from fednorm.engines.base import ClientSource
from fednorm.nn.copies import copy_model

CLOSE = 1e-9  # largest gap that rounding explains


@dataclass(frozen=True, slots=True)
class Gap:
    """Where two engines are furthest apart, and how far: |a-b|/(1+|b|)."""

    size: float
    what: str


def find_gap(expected: Tensors, got: Tensors) -> Gap:
    """Compare tensors of the same names; return the largest gap.

    >>> one = {"a": torch.zeros(2), "b": torch.ones(1)}
    >>> find_gap(one, {**one, "b": torch.tensor([1.5])})
    Gap(size=0.25, what='b')
    """
    if expected.keys() != got.keys():
        return Gap(float("inf"), ", ".join(sorted(expected.keys() ^ got.keys())))
    gaps = [Gap(_distance(expected[name], got[name]), name) for name in expected]
    return max(gaps, key=lambda gap: gap.size)


def _distance(expected: Tensor, got: Tensor) -> float:
    theirs = expected.double()
    apart = ((got.double() - theirs).abs() / (1 + theirs.abs())).nan_to_num(nan=float("inf"))
    return float(apart.max()) if apart.numel() else 0.0


def find_misfit(
    engine: str, clients: Sequence[ClientId], task: Task, compare: Callable[[Task], Gap]
) -> str | None:
    """Return how `engine` differs from the loop, or None; `compare` gets `task` in float64."""
    who = " and ".join(map(str, clients))
    how = f"engine {engine!r} was tried on clients {who} in double precision, against the loop"
    try:
        gap = compare(_to_double(task))
    except Exception as error:  # noqa: BLE001 (a user's model may raise anything)
        return f"{how}: it fails ({type(error).__name__}: {error})"
    if gap.size <= CLOSE:
        return None
    return f"{how}: {gap.what} is off by {gap.size:.1e}, and rounding explains {CLOSE:g} at most"


def _to_double(task: Task) -> Task:
    """Return a task in full double precision, with a copy of the model."""
    model = copy_model(task.model).double()
    tensors = find_layout(model, task.strategy.role)
    exact = replace(task, model=model, layout=tensors, precision="full")
    load_state(exact, task.initial_state, task.initial_client_state)
    return replace(
        exact,
        initial_state=read_state(tensors),
        initial_client_state=ClientState(tensors=snapshot(tensors.personal)),
    )


def take_first_steps(own: Batches, count: int) -> Batches:
    """Return the first steps of a client's batches, in double precision."""
    steps, everything = (
        [(x.double() if x.is_floating_point() else x, y) for x, y in islice(part, count)]
        for part in (own.steps, own.all_steps)
    )
    return replace(own, steps=steps, all_data=everything)


@dataclass(frozen=True, slots=True)
class FewClients(ClientSource):
    """The `chosen` clients, which take part in every round with one step each."""

    clients: ClientSource
    chosen: Sequence[ClientId]

    def all(self) -> list[ClientId]:
        """Return the chosen ones."""
        return list(self.chosen)

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return the first batch of a client's round."""
        return take_first_steps(self.clients.batches(client, round_), 1)

    def all_batches(self, client: ClientId) -> Batches:
        """Return the first batch of a client's data."""
        return take_first_steps(self.clients.all_batches(client), 1)


def collect_numbers(results: Sequence[tuple[Reply, ClientState]]) -> dict[str, Tensor]:
    """Return all tensors that clients send and keep, by a description."""
    found: dict[str, Tensor] = {}
    for reply, client_state in results:
        whose = f"of client {reply.client}"
        parts = {
            "the update": reply.update,
            "the momentum": {**reply.momentum, **client_state.optimizer},
            "the own tensor": client_state.tensors,
            "the means": {p: _join(m.mean for m in r.calls) for p, r in reply.stats.items()},
            "the variances": {p: _join(m.var for m in r.calls) for p, r in reply.stats.items()},
        }
        for what, tensors in parts.items():
            found |= {f"{what} of {name!r} {whose}": t for name, t in tensors.items()}
        found[f"the loss {whose}"] = torch.tensor(reply.loss, dtype=torch.float64)
    return found


def _join(calls: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in calls])
