"""Normalization layers that are right in federated learning.

Compare strategies with `compare`, run one with `simulate`, convert a model with `convert`, or call
`client_round` and `server_round` from your own loop. `fednorm.flower` is for Flower apps,
`fednorm.doctor` examines a model, and `fednorm.errors` holds all exceptions.

Names are imported when they are first used, so that `import fednorm` does not import torch.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from fednorm import errors
from fednorm.errors import FednormError
from fednorm.registry import export_lazily

if TYPE_CHECKING:
    from fednorm import doctor, flower
    from fednorm.aggregators import create_aggregator, list_aggregators
    from fednorm.algorithms import create_algorithm, list_algorithms
    from fednorm.api import compare, load, simulate
    from fednorm.attacks import create_attack, list_attacks
    from fednorm.core.messages import Batches, Broadcast, Claim, ClientState, Reply, ServerState
    from fednorm.core.moments import Moments, pool
    from fednorm.core.replies.privacy import Privacy
    from fednorm.core.round import broadcast, client_round, server_round
    from fednorm.core.task import Task, export
    from fednorm.data import list_datasets, load_dataset
    from fednorm.data.partition import create_partition, list_partitions, partition
    from fednorm.engines.calibration import calibrate
    from fednorm.experiment.callbacks import create_callback, list_callbacks
    from fednorm.experiment.callbacks.base import Callback
    from fednorm.experiment.results import Comparison, Evaluation, RunResult
    from fednorm.models import create_model, list_models
    from fednorm.nn.folding import fold
    from fednorm.strategies import convert, create_strategy, list_strategies

__version__: str  # read from the installed package when it is asked for

__all__ = [
    "Batches",
    "Broadcast",
    "Callback",
    "Claim",
    "ClientState",
    "Comparison",
    "Evaluation",
    "FednormError",
    "Moments",
    "Privacy",
    "Reply",
    "RunResult",
    "ServerState",
    "Task",
    "broadcast",
    "calibrate",
    "client_round",
    "compare",
    "convert",
    "create_aggregator",
    "create_algorithm",
    "create_attack",
    "create_callback",
    "create_model",
    "create_partition",
    "create_strategy",
    "doctor",
    "errors",
    "export",
    "flower",
    "fold",
    "list_aggregators",
    "list_algorithms",
    "list_attacks",
    "list_callbacks",
    "list_datasets",
    "list_models",
    "list_partitions",
    "list_strategies",
    "load",
    "load_dataset",
    "partition",
    "pool",
    "server_round",
    "simulate",
]

_find_export = export_lazily(
    __name__,
    {
        "fednorm.aggregators": "create_aggregator list_aggregators",
        "fednorm.algorithms": "create_algorithm list_algorithms",
        "fednorm.api": "compare load simulate",
        "fednorm.attacks": "create_attack list_attacks",
        "fednorm.core.messages": "Batches Broadcast Claim ClientState Reply ServerState",
        "fednorm.core.moments": "Moments pool",
        "fednorm.core.replies.privacy": "Privacy",
        "fednorm.core.round": "broadcast client_round server_round",
        "fednorm.core.task": "Task export",
        "fednorm.data": "list_datasets load_dataset",
        "fednorm.data.partition": "create_partition list_partitions partition",
        "fednorm.engines.calibration": "calibrate",
        "fednorm.experiment.callbacks": "create_callback list_callbacks",
        "fednorm.experiment.callbacks.base": "Callback",
        "fednorm.experiment.results": "Comparison Evaluation RunResult",
        "fednorm.models": "create_model list_models",
        "fednorm.nn.folding": "fold",
        "fednorm.strategies": "convert create_strategy list_strategies",
    },
)
_MODULES = ("doctor", "flower", "strategies")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return _find_export(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
