"""What Flower's clients do; the work is named by the environment variable FEDNORM_WORK.

In a separate module: ray sends what it finds in the main script by value, with every message,
and clients could keep nothing from one message to the next.
"""

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peers.common import batches
from torch import Tensor, nn
from torch.nn import functional
from works import WORKS, network, tensors

WORK = WORKS[os.environ["FEDNORM_WORK"]]
client_app = ClientApp()


@cache
def held() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model and all images: made once in each of ray's processes."""
    torch.set_num_threads(1)
    return network(WORK).to(memory_format=torch.channels_last), *tensors(WORK)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's images."""
    model, x, y = held()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=WORK.lr, momentum=WORK.momentum)
    for images, labels in batches(WORK, x, y, int(context.node_config["partition-id"])):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": WORK.held}),
    }
    return Message(content=RecordDict(content), reply_to=message)
