"""Asks clients for the statistics of their data under the shared weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from fednorm.attacks import Adversary, apply_attack
from fednorm.core.messages import Broadcast, Memory, Rejected, ServerState, bytes_down, report_bytes
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
    rejected: tuple[Rejected, ...] = ()  # answers that were not used


# Lets clients that are elsewhere, with memories of their own, survey their data.
Ask: TypeAlias = Callable[[Task, Broadcast, Sequence[ClientId]], list[Surveyed]]


@dataclass(frozen=True, slots=True)
class Way:
    """How answers come to the server: who falsifies them, and whether clients are elsewhere."""

    adversary: Adversary | None = None
    ask: Ask | None = None


DIRECT = Way()


def survey(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    asked: Sequence[ClientId],
    way: Way = DIRECT,
) -> tuple[ServerState, Asked]:
    """Survey all data of the asked clients and let the strategy adopt the result."""
    received, rule = broadcast(task, state), task.strategy.survey_rule()
    if way.ask:
        own = way.ask(task, received, asked)
    else:
        own = [
            client_survey(task, received, memories.get(c, Memory()), clients.everything(c), rule)
            for c in asked
        ]
    answers = apply_attack(own, way.adversary, received.round, survey=True)
    after = server_survey(task, state, answers)
    size = fmean(report_bytes(answer.stats) for answer in answers) if answers else 0.0
    return after, Asked(1, size, bytes_down(received), after.rejected)


def surveyed(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    way: Way = DIRECT,
) -> ServerState:
    """Return the state that is tested: strategies may ask all clients before an evaluation."""
    if task.strategy.survey != "evaluation":
        return state
    return survey(task, state, memories, clients, clients.all(), way)[0]
