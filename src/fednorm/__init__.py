"""Normalization layers that are right in federated learning.

Compare strategies with `compare`, run one with `simulate`, or call `client_round` and
`server_round` from a loop of your own.
"""

from fednorm.algorithms import create_algorithm
from fednorm.api import compare, simulate
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply, ServerState
from fednorm.core.moments import Moments, pool
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.task import Task, export
from fednorm.data.partition import partition
from fednorm.strategies import create_strategy, list_strategies

__all__ = [
    "Batches",
    "Broadcast",
    "ClientState",
    "Moments",
    "Reply",
    "ServerState",
    "Task",
    "broadcast",
    "client_round",
    "compare",
    "create_algorithm",
    "create_strategy",
    "export",
    "list_strategies",
    "partition",
    "pool",
    "server_round",
    "simulate",
]
