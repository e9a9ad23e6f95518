"""The same work in pfl: federated averaging on its simulated backend.

    python pfl.py WORK ROUNDS

pfl shares the clients of a round among processes; here two with one thread each, started by
torchrun. It averages parameters only, so running statistics are added to what it averages. It
always evaluates in its first round, which is not counted.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROCESSES = 2
if "RANK" not in os.environ:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    os.execv(sys.executable, [sys.executable, *run, *sys.argv])  # noqa: S606 (no shell is meant)
sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
import torch
from peers.common import Clock, arguments, batches
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional
from works import network, tensors

WORK, ROUNDS = arguments(threads=1)
X, Y = tensors(WORK)


class Images(Dataset):
    """Images of one client."""

    def __init__(self, client: int) -> None:
        held = slice(client * WORK.held, (client + 1) * WORK.held)
        super().__init__((X[held], Y[held]), user_id=str(client))

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one round."""
        del batch_size
        return batches(WORK, X, Y, int(self.user_id))


class Timed(TrainingProcessCallback):
    """Says how long a round took."""

    def __init__(self) -> None:
        self.clock = Clock()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        """End a round."""
        if os.environ["RANK"] == "0":
            self.clock.lap()
        return False, Metrics()


np.random.seed(0)  # noqa: NPY002 (pfl wants all processes to begin alike)
module = network(WORK).to(memory_format=torch.channels_last).train()
module.loss = lambda x, y: functional.cross_entropy(module(x), y)
module.metrics = lambda *_: {}
statistics = {key: value for key, value in module.named_buffers() if value.is_floating_point()}
model = PyTorchModel(
    module,
    lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=WORK.momentum),
    torch.optim.SGD([*module.parameters(), *statistics.values()], lr=1.0),
)
model.variable_map.update(statistics)
clients = random.Random(0).sample(range(WORK.clients), WORK.clients)  # noqa: S311
images = FederatedDataset(Images, MinimizeReuseUserSampler(clients))
FederatedAveraging().run(
    NNAlgorithmParams(ROUNDS, ROUNDS + 1, WORK.sampled, None),
    SimulatedBackend(images, images),
    model,
    NNTrainHyperParams(WORK.batch, None, WORK.lr, local_num_steps=WORK.steps),
    callbacks=[Timed()],
)
