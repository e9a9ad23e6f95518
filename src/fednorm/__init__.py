"""Normalization layers that are right in federated learning.

Compare strategies with `compare`, run one with `simulate`, or call `client_round` and
`server_round` from a loop of your own.
"""

from fednorm.algorithms import create_algorithm
from fednorm.api import compare, simulate
from fednorm.core.messages import Batches, Broadcast, Memory, Reply, ServerState
from fednorm.core.moments import Moments, pool
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.task import Task, export
from fednorm.data.partition import partition
from fednorm.strategies import strategies, strategy

__all__ = [
    "Batches",
    "Broadcast",
    "Memory",
    "Moments",
    "Reply",
    "ServerState",
    "Task",
    "broadcast",
    "client_round",
    "compare",
    "create_algorithm",
    "export",
    "partition",
    "pool",
    "server_round",
    "simulate",
    "strategies",
    "strategy",
]
