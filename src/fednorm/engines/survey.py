"""Asks clients for the statistics of their data under the shared weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fednorm.attacks import Adversary, attacked
from fednorm.core.messages import Memory, Rejected, ServerState, bytes_down, report_bytes
from fednorm.core.round import broadcast
from fednorm.core.survey import client_survey, server_survey
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


NOTHING_ASKED = Asked(0, 0.0, 0.0)


def survey(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    asked: Sequence[ClientId],
    adversary: Adversary | None = None,
) -> tuple[ServerState, Asked]:
    """Survey all data of the asked clients and let the strategy adopt the result."""
    received, rule = broadcast(task, state), task.strategy.survey_rule()
    own = [
        client_survey(task, received, memories.get(c, Memory()), clients.everything(c), rule)
        for c in asked
    ]
    answers = attacked(own, adversary, received.round, survey=True)
    after = server_survey(task, state, answers)
    size = fmean(report_bytes(answer.stats) for answer in answers)
    return after, Asked(1, size, bytes_down(received), after.rejected)


def surveyed(
    task: Task,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Clients,
    adversary: Adversary | None = None,
) -> ServerState:
    """Return the state that is tested: strategies may ask all clients before an evaluation."""
    if task.strategy.survey != "evaluation":
        return state
    return survey(task, state, memories, clients, clients.all(), adversary)[0]
