"""Flower's own quickstart for PyTorch, changed by the lines of docs/flower.md and no others.

`client_app.py`, `server_app.py` and `task.py` of examples/quickstart-pytorch, in one file: the
comments `# Flower:` show what stood there. Data and network are small, and the network has
BatchNorm: convolution, norm, ReLU. `test` calls `net.eval()`, which a network with BatchNorm needs.
"""
# ruff: noqa: ERA001, N812, RET504, ARG001 (it is as Flower has it)

import sys

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader

import fednorm.flower


# task.py
class Net(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def samples(count, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    images = torch.randn(count, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[0, 2 * label : 2 * label + 2] += 2.0
    return [
        {"img": (1 + shift) * image + shift, "label": label}
        for image, label in zip(images, labels, strict=True)
    ]


def load_data(partition_id, num_partitions, batch_size):
    held = samples(20 + 12 * partition_id, partition_id, shift=0.5 * partition_id)
    split = len(held) * 4 // 5
    generator = torch.Generator().manual_seed(num_partitions)
    trainloader = DataLoader(held[:split], batch_size=batch_size, shuffle=True, generator=generator)
    return trainloader, DataLoader(held[split:], batch_size=batch_size)


def load_centralized_dataset():
    return DataLoader(samples(40, 99, shift=0.5), batch_size=128)


def train_fn(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device)  # move model to GPU if available
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            images = batch["img"].to(device)
            labels = batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    avg_trainloss = running_loss / (epochs * len(trainloader))
    return avg_trainloss


def test_fn(net, testloader, device):
    """Validate the model on the test set."""
    net.to(device)
    net.eval()  # Flower: (none), its network needs none
    criterion = torch.nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for batch in testloader:
            images = batch["img"].to(device)
            labels = batch["label"].to(device)
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += (torch.max(outputs.data, 1)[1] == labels).sum().item()
    accuracy = correct / len(testloader.dataset)
    loss = loss / len(testloader)
    return loss, accuracy


# client_app.py
def train(msg, context):
    """Train the model on local data."""
    # Load the model and initialize it with the received weights
    model = fednorm.flower.unpack(msg, Net(), context)
    # Flower: model = Net()
    # Flower: model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model.to(device)

    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    trainloader, _ = load_data(partition_id, num_partitions, batch_size)

    # Call the training function
    train_loss = train_fn(
        model,
        trainloader,
        context.run_config["local-epochs"],
        msg.content["config"]["lr"],
        device,
    )

    # Construct and return reply Message
    metrics = {
        "train_loss": train_loss,
        "num-examples": len(trainloader.dataset),
    }
    return fednorm.flower.pack(
        model, msg, context, examples=metrics["num-examples"], metrics=metrics
    )
    # Flower: model_record = ArrayRecord(model.state_dict())
    # Flower: metric_record = MetricRecord(metrics)
    # Flower: content = RecordDict({"arrays": model_record, "metrics": metric_record})
    # Flower: return Message(content=content, reply_to=msg)


def evaluate(msg, context, unpacks=False):
    """Evaluate the model on local data."""
    # Load the model and initialize it with the received weights
    if unpacks:  # the line for strategies whose models are not the plain one
        model = fednorm.flower.unpack(msg, Net(), context)
    else:
        model = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model.to(device)

    # Load the data
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    _, valloader = load_data(partition_id, num_partitions, batch_size)

    # Call the evaluation function
    eval_loss, eval_acc = test_fn(
        model,
        valloader,
        device,
    )

    # Construct and return reply Message
    metrics = {
        "eval_loss": eval_loss,
        "eval_acc": eval_acc,
        "num-examples": len(valloader.dataset),
    }
    metric_record = MetricRecord(metrics)
    content = RecordDict({"metrics": metric_record})
    return Message(content=content, reply_to=msg)


def make_client(*, unpacks=False, answers=False, mods=()):
    app = ClientApp(mods=list(mods))
    app.train()(train)
    app.evaluate()(lambda msg, context: evaluate(msg, context, unpacks))
    if answers:

        @app.query("fednorm")
        def measure(msg, context):
            trainloader, _ = load_data(
                context.node_config["partition-id"],
                context.node_config["num-partitions"],
                context.run_config["batch-size"],
            )
            # All of the node's data once.
            batches = [(batch["img"], batch["label"]) for batch in trainloader]
            return fednorm.flower.calibrate(
                msg, Net(), context, batches, examples=len(trainloader.dataset)
            )

    return app


# server_app.py
def make_server(name, path, central=None):
    """Return the app; `central` makes another evaluate_fn from the strategy."""
    app = ServerApp()

    @app.main()
    def main(grid, context):
        """Main entry point for the ServerApp."""
        # Read run config
        fraction_evaluate: float = context.run_config["fraction-evaluate"]
        num_rounds: int = context.run_config["num-server-rounds"]
        lr: float = context.run_config["learning-rate"]

        # Load global model
        global_model = Net()
        arrays = ArrayRecord(global_model.state_dict())

        # Initialize the strategy
        strategy = fednorm.flower.NormStrategy(
            name, model=global_model, fraction_evaluate=fraction_evaluate
        )
        # Flower: strategy = FedAvg(fraction_evaluate=fraction_evaluate)

        # Start strategy, run for `num_rounds`
        result = strategy.start(
            grid=grid,
            initial_arrays=arrays,
            train_config=ConfigRecord({"lr": lr}),
            num_rounds=num_rounds,
            evaluate_fn=central(strategy) if central else global_evaluate,
        )

        # Save final model to disk
        state_dict = result.arrays.to_torch_state_dict()
        torch.save(state_dict, path)
        app.seen = strategy, result

    return app


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate model on central data."""
    # Load the model and initialize it with the received weights
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model.to(device)

    # Load entire test set
    test_dataloader = load_centralized_dataset()

    # Evaluate the global model on the test set
    test_loss, test_acc = test_fn(model, test_dataloader, device)

    # Return the evaluation metrics
    return MetricRecord({"accuracy": test_acc, "loss": test_loss})


# What `flwr run` reads from pyproject.toml.
CONFIG = {
    "num-server-rounds": 2, "fraction-evaluate": 1.0, "local-epochs": 2, "learning-rate": 0.05,
    "batch-size": 8,
}  # fmt: skip


def set_config(msg, context, call_next):
    """Give a simulated node the app's configuration."""
    own = (context.run_id, context.node_id, context.node_config, context.state)
    return call_next(msg, Context(*own, dict(CONFIG)))


def simulate(*runs):
    """Run the app on Flower's simulation runtime, once for each strategy and path of `runs`."""
    app = ServerApp()

    @app.main()
    def main(grid, context):
        context.run_config = dict(CONFIG)
        for name, path in zip(runs[::2], runs[1::2], strict=True):
            central = (lambda _: None) if name == "gn" else None
            make_server(name, path, central)(grid, context)

    run_simulation(
        app,
        make_client(mods=[set_config]),
        num_supernodes=3,
        backend_config={"init_args": {"address": "local"}, "client_resources": {"num_cpus": 1}},
    )


if __name__ == "__main__":
    simulate(*sys.argv[1:])
