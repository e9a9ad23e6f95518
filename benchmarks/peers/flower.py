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
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional
from works import WORKS, as_floats, network, tensors

logging.getLogger("flwr").setLevel(logging.ERROR)
WORK = WORKS[sys.argv[1]]
ROUNDS = int(sys.argv[2])
held: dict = {}
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's images."""
    torch.set_num_threads(1)
    if not held:
        held["x"], held["y"] = tensors(WORK)
        held["model"] = network(WORK).to(memory_format=torch.channels_last)
    model = held["model"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=WORK.lr, momentum=WORK.momentum)
    first = int(context.node_config["partition-id"]) * WORK.held
    for _ in range(WORK.steps):
        chosen = first + torch.randperm(WORK.held)[: WORK.batch]
        x = as_floats(held["x"][chosen]).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), held["y"][chosen]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": WORK.held}),
    }
    return Message(content=RecordDict(content), reply_to=message)


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
