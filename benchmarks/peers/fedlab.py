"""The same work in FedLab: its serial trainer, synchronous server and standalone pipeline.

    python fedlab.py WORK ROUNDS [THREADS]

FedLab sends parameters only, so running statistics are made parameters. It flattens weights with
`view`, which `channels_last` weights do not allow: only the images are in `channels_last`, which
is enough for convolutions to work in it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

import torch
from peers.common import (
    Clock,
    arguments,
    batches,
    prepare_torchvision,
    with_statistics_as_parameters,
)
from torch import Tensor
from works import network, tensors

prepare_torchvision()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline

WORK, ROUNDS = arguments()


class Images(FedDataset):
    """Images of all clients."""

    def __init__(self) -> None:
        self.x, self.y = tensors(WORK)

    def get_dataloader(
        self, client: int, batch_size: int, kind: str = "train"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one client in one round."""
        del batch_size, kind
        return batches(WORK, self.x, self.y, client)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer, with momentum that begins anew for every client."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train one client."""
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=WORK.lr, momentum=WORK.momentum
        )
        return super().train(*args, **kwargs)


class Timed(StandalonePipeline):
    """FedLab's pipeline that says how long a round took, in place of evaluating."""

    def evaluate(self) -> None:
        """End a round."""
        clock.lap()


model = with_statistics_as_parameters(network(WORK).to(memory_format=torch.contiguous_format))
trainer = Trainer(model, WORK.clients)
trainer.setup_dataset(Images())
trainer.setup_optim(epochs=1, batch_size=WORK.batch, lr=WORK.lr)
pipeline = Timed(SyncServerHandler(model, ROUNDS, WORK.sampled / WORK.clients), trainer)
clock = Clock()
pipeline.main()
