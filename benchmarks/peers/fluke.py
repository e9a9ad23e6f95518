"""The same work in fluke: its clients, server and centralised algorithm, all in memory.

    python fluke.py WORK ROUNDS [THREADS]

fluke averages all tensors by itself.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

import torch
from peers.common import Clock, arguments, batches, prepare_torchvision
from torch import Tensor, nn
from works import network, tensors

prepare_torchvision()

from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver

WORK, ROUNDS = arguments()
X, Y = tensors(WORK)


class Images(FastDataLoader):
    """Images of one client."""

    def __init__(self, client: int) -> None:
        held = slice(client * WORK.held, (client + 1) * WORK.held)
        super().__init__(X[held], Y[held], num_labels=10, batch_size=WORK.batch)
        self.client = client

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(WORK, X, Y, self.client)


class Timed(FederationObserver):
    """Says how long a round took."""

    def __init__(self) -> None:
        self.clock = Clock()

    def end_round(self, *_: Any, **__: Any) -> None:
        """End a round."""
        self.clock.lap()


FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
sgd = OptimizerConfigurator({"name": "SGD", "lr": WORK.lr, "momentum": WORK.momentum})
clients = [
    # What is not persistent begins anew in every round: model, momentum.
    Client(i, Images(i), None, sgd, nn.CrossEntropyLoss(), local_epochs=1, persistency=False)
    for i in range(WORK.clients)
]
server = Server(network(WORK).to(memory_format=torch.channels_last), None, clients)
algorithm = CentralizedFL(WORK.clients, None, {}, clients=clients, server=server)
algorithm.set_callbacks([Timed()])
algorithm.run(ROUNDS, WORK.sampled / WORK.clients)
