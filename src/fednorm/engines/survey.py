"""Asks clients for the statistics of their data under the shared weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from fednorm.attacks import Adversary, apply_attack
from fednorm.core.messages import (
    Broadcast,
    ClientState,
    RejectedReply,
    ServerState,
    download_bytes,
    report_bytes,
)
from fednorm.core.round import broadcast
from fednorm.core.survey import CalibrationReply, client_calibration, server_calibration
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.clients import ClientSource


@dataclass(frozen=True, slots=True)
class CalibrationCost:
    """What a survey cost: exchanges, and bytes of one client."""

    exchanges: int
    bytes_up: float
    bytes_down: float
    rejected: tuple[RejectedReply, ...] = ()  # answers that were not used


# Lets clients that are elsewhere, with memories of their own, survey their data.
Ask: TypeAlias = Callable[[Task, Broadcast, Sequence[ClientId]], list[CalibrationReply]]


@dataclass(frozen=True, slots=True)
class Transport:
    """How answers come to the server: who falsifies them, and whether clients are elsewhere."""

    adversary: Adversary | None = None
    ask: Ask | None = None


DIRECT = Transport()


def calibrate_clients(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    clients: ClientSource,
    asked: Sequence[ClientId],
    way: Transport = DIRECT,
) -> tuple[ServerState, CalibrationCost]:
    """Survey all data of the asked clients and let the strategy adopt the result."""
    received, rule = broadcast(task, state), task.strategy.calibration_rule()
    if way.ask:
        own = way.ask(task, received, asked)
    else:
        own = [
            client_calibration(
                task, received, client_states.get(c, ClientState()), clients.all_batches(c), rule
            )
            for c in asked
        ]
    answers = apply_attack(own, way.adversary, received.round, survey=True)
    after = server_calibration(task, state, answers)
    size = fmean(report_bytes(answer.stats) for answer in answers) if answers else 0.0
    return after, CalibrationCost(1, size, download_bytes(received), after.rejected)


def calibrate_for_test(
    task: Task,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    clients: ClientSource,
    way: Transport = DIRECT,
) -> ServerState:
    """Return the state that is tested: strategies may ask all clients before an evaluation."""
    if task.strategy.calibration != "evaluation":
        return state
    return calibrate_clients(task, state, client_states, clients, clients.all(), way)[0]
