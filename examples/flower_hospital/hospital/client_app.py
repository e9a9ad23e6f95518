"""What runs in a hospital."""

from pathlib import Path

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import save_file

import fednorm
import fednorm.flower
from hospital.task import build_model, fit, load_images, make_batches, score

app = ClientApp()


def find_folder(context: Context) -> Path:
    """Return the hospital's images: `data-path` of its node, or the n-th folder of a simulation."""
    if "data-path" in context.node_config:
        return Path(str(context.node_config["data-path"])).expanduser()
    folders = sorted(p for p in Path(str(context.run_config["data"])).iterdir() if p.is_dir())
    return folders[int(context.node_config["partition-id"])]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the hospital's own images."""
    config = context.run_config
    data = load_images(find_folder(context), config)
    model = fednorm.flower.unpack(message, build_model(config), context)
    groups = fednorm.flower.parameter_groups(model, lr=float(config["learning-rate"]))
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)
    random = torch.Generator().manual_seed(int(message.content["config"]["server-round"]))
    loss = fit(model, data, optimizer, config, random)
    examples = len(data.y)
    return fednorm.flower.pack(model, message, context, examples=examples, metrics={"loss": loss})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model, with what this hospital keeps of it, on images that it held out."""
    config, folder = context.run_config, find_folder(context)
    data = load_images(folder, config)
    model = fednorm.flower.unpack(message, build_model(config), context)
    if config[
        "own-statistics"
    ]:  # of this hospital's images, under the weights that have just arrived
        model = fednorm.calibrate(model, [make_batches(data)], exact=False)
    metrics = MetricRecord(score(model, data))
    if config["output"]:
        output = Path(str(config["output"]))
        output.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), output / f"{folder.name}.safetensors")
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query("fednorm")
def calibrate(message: Message, context: Context) -> Message:
    """Measure statistics with a pass over all own images, for strategies that ask for it."""
    config = context.run_config
    data = load_images(find_folder(context), config)
    batches, examples = make_batches(data), len(data.y)
    return fednorm.flower.calibrate(
        message, build_model(config), context, batches, examples=examples
    )
