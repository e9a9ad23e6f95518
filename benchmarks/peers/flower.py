"""The same work in Flower's simulation: plain FedAvg with every tensor of the model.

    python flower.py WORK ROUNDS

Flower runs all its rounds in one call; the seconds of each round are written at its end.
"""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["FEDNORM_WORK"] = sys.argv[1]  # ray's processes inherit it
sys.path[0] = str(Path(__file__).parents[1])  # and the path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.flower_client import WORK, client_app
from works import network

logging.getLogger("flwr").setLevel(logging.ERROR)
ROUNDS = int(sys.argv[2])
server_app = ServerApp()


class Timed(FedAvg):
    """FedAvg that says how long each round took."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a round."""
        self.start = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
        """End a round."""
        result = super().aggregate_train(*args, **kwargs)
        print(time.perf_counter() - self.start, flush=True)
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    del context
    strategy = Timed(
        fraction_train=WORK.sampled / WORK.clients,
        fraction_evaluate=0.0,
        min_train_nodes=WORK.sampled,
        min_available_nodes=WORK.clients,
    )
    strategy.start(grid, ArrayRecord(network(WORK).state_dict()), num_rounds=ROUNDS)


run_simulation(
    server_app,
    client_app,
    num_supernodes=WORK.clients,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
)
