"""What runs on a client."""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import fednorm.flower
from quickstart.task import Net, client_data

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own digits for a few steps."""
    torch.set_num_threads(1)
    client, clients = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    x, y = client_data(client, clients)
    model = fednorm.flower.unpack(message, Net(), context)
    config, last = context.run_config, 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["learning-rate"]))
    seed = 1000 * int(message.content["config"]["server-round"]) + client
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    size = int(config["batch-size"])
    for picked in order.split(size)[: int(config["local-steps"])]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[picked]), y[picked])
        loss.backward()
        optimizer.step()
        last = loss.item()
    return fednorm.flower.pack(model, message, context, examples=len(y), metrics={"loss": last})
