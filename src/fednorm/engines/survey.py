"""Asks clients for the statistics of their data under the shared weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from fednorm.core.messages import Broadcast, Memory, ServerState, bytes_down, report_bytes
from fednorm.core.round import broadcast
from fednorm.core.survey import Surveyed, client_survey, server_survey
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.clients import Clients


@dataclass(frozen=True, slots=True)
class Asked:
    """What a survey cost: exchanges, and bytes of one client."""

    exchanges: int
    bytes_up: float
    bytes_down: float


# Lets clients that are elsewhere, with memories of their own, survey their data.
Ask: TypeAlias = Callable[[Task, Broadcast, Sequence[ClientId]], list[Surveyed]]


def survey(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    asked: Sequence[ClientId],
    ask: Ask | None = None,
) -> tuple[ServerState, Asked]:
    """Survey all data of the asked clients and let the strategy adopt the result."""
    received, rule = broadcast(task, state), task.strategy.survey_rule()
    surveyed = (
        ask(task, received, asked)
        if ask
        else [
            client_survey(task, received, memories.get(c, Memory()), clients.everything(c), rule)
            for c in asked
        ]
    )
    up = fmean(report_bytes(s.stats) for s in surveyed) if surveyed else 0.0
    return server_survey(task, state, surveyed), Asked(1, up, bytes_down(received))


def surveyed(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    ask: Ask | None = None,
) -> ServerState:
    """Return the state that is tested: strategies may ask all clients before an evaluation."""
    if task.strategy.survey != "evaluation":
        return state
    return survey(task, state, memories, clients, clients.all(), ask)[0]
