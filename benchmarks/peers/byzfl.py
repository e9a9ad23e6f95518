"""The same work in ByzFL: its clients and server, with the average as its rule.

    python byzfl.py WORK ROUNDS [THREADS]

The loop is that of ByzFL's own training, which knows only its own data sets and models. Weights
are flattened with `view`, so that only the images are in `channels_last`.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

import torch
from peers.common import Clock, arguments, batches, prepare_torchvision
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from works import network, tensors

prepare_torchvision()

from byzfl.fed_framework import Client, Server, models

WORK, ROUNDS = arguments()
X, Y = tensors(WORK)
models.same = lambda: network(WORK).to(memory_format=torch.contiguous_format)
SHARED = {
    "model_name": "same",
    "device": "cpu",
    "optimizer_name": "SGD",
    "optimizer_params": {"momentum": WORK.momentum},
    "learning_rate": WORK.lr,
    "weight_decay": 0.0,
    "milestones": [],
    "learning_rate_decay": 1.0,
}


class Images(IterableDataset):
    """Batches of one client without end."""

    def __init__(self, client: int) -> None:
        self.client = client

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from batches(WORK, X, Y, self.client)


def loader(client: int) -> DataLoader:
    """Return what ByzFL wants to have: a loader that passes ready batches on."""
    return DataLoader(Images(client), batch_size=None)


def client(index: int) -> Client:
    """Return one client."""
    own = {
        "loss_name": "CrossEntropyLoss",
        "LabelFlipping": False,
        "nb_labels": 10,
        "momentum": 0.0,
        "training_dataloader": loader(index),
        "store_per_client_metrics": False,
    }
    return Client(SHARED | own)


rule = {"aggregator_info": {"name": "Average", "parameters": {}}, "pre_agg_list": []}
server = Server(SHARED | rule | {"test_loader": loader(0)})
clients = [client(index) for index in range(WORK.clients)]
clock = Clock()
for _ in range(ROUNDS):
    chosen = random.sample(clients, WORK.sampled)
    for each in chosen:
        each.set_model_state(server.get_dict_parameters())
        each.optimizer.state.clear()  # momentum begins anew
        each.compute_model_update(WORK.steps)
    server.update_model_with_weights([each.get_flat_parameters() for each in chosen])
    clock.lap()
