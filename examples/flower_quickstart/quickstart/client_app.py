"""What runs on a client."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fednorm.flower
from quickstart.task import Net, accuracy, client_data, fit

app = ClientApp()


def own_data(context: Context, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return the images and labels of this node."""
    torch.set_num_threads(1)
    client, clients = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    return client_data(client, clients, held_out=held_out)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own digits for some epochs."""
    x, y = own_data(context)
    config, size = context.run_config, int(context.run_config["batch-size"])
    batches = list(zip(x.split(size), y.split(size), strict=True))
    model = fednorm.flower.unpack(message, Net(), context, data=batches)
    groups = fednorm.flower.parameter_groups(model, lr=float(config["learning-rate"]))
    optimizer, loss = torch.optim.SGD(groups), 0.0
    server_round = int(message.content["config"]["server-round"])
    random = torch.Generator().manual_seed(
        1000 * server_round + int(context.node_config["partition-id"])
    )
    for _ in range(int(config["local-epochs"])):
        order = torch.randperm(len(y), generator=random).split(size)
        loss = fit(model, optimizer, ((x[picked], y[picked]) for picked in order))
    return fednorm.flower.pack(model, message, context, examples=len(y), metrics={"loss": loss})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the client's model on the digits that it held out."""
    x, y = own_data(context, held_out=True)
    model = fednorm.flower.unpack(message, Net(), context)
    metrics = MetricRecord({"accuracy": accuracy(model, x, y), "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query("fednorm")
def calibrate(message: Message, context: Context) -> Message:
    """Measure statistics with a pass over all own digits, for strategies that ask for it."""
    x, y = own_data(context)
    batches = zip(x.split(100), y.split(100), strict=True)
    return fednorm.flower.calibrate(message, Net(), context, batches, examples=len(y))
