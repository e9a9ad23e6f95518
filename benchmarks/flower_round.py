"""Seconds per round of a plain Flower app, of the same app with fednorm, and of `fednorm run`.

Run it with `python benchmarks/flower_round.py`, where "fednorm[flower]" and the tests' requirements
are installed. A SuperLink and two SuperNodes run on this machine, with TLS; contenders take turns,
pass by pass. All train a ResNet-20 for five steps of 20 images on each node, and test the model at
the server after each round; the plain app does not import fednorm. `--evaluate` lets nodes test it,
too: a second message for the two apps. The first round of a pass, in which the server starts, is
left out. Next to seconds of a round, in which Flower's processes mostly wait for each other, stand
the CPU seconds of the process that answers one message, from its start to its end, which other
programs on the machine change less. `--poll 0.1` lets SuperExecs look for work ten times a second
instead of once.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

import tomli_w

from fednorm.experiment.flower.submit import SuperLink, submit
from fednorm.experiment.results import Event
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flower.deployment import BIN, QUIET, Deployment

TASK = """
import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short = nn.Sequential()
        if before != after:
            self.short = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.short(x))


class Net(nn.Sequential):
    def __init__(self):
        stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        widths = [(16, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 32), (32, 64), (64, 64)]
        blocks = [Block(a, b, 1 if a == b else 2) for a, b in [*widths, (64, 64)]]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def images(seed, count):
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 1, 8, 8, generator=made),
        torch.randint(10, (count,), generator=made),
    )


def fit(model, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in zip(*(part.split(20) for part in images(seed, 100))):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def score(model, seed):
    x, y = images(seed, 400)
    return float((model(x).argmax(1) == y).double().mean())
"""
CLIENT = """
import atexit
import time

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
{imports}
from compared.task import Net, fit, score

app = ClientApp()
atexit.register(lambda: print(f"CPU {name} {{time.process_time():.3f}}", flush=True))


@app.train()
def train(message, context):
    {receive}
    loss = fit(model.train(), context.node_config["partition-id"])
    {reply}


@app.evaluate()
def evaluate(message, context):
    {receive}
    metrics = {{"accuracy": score(model.eval(), 7), "num-examples": 400}}
    return Message(RecordDict({{"metrics": MetricRecord(metrics)}}), reply_to=message)
"""
SERVER = """
import time

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
{imports}
from compared.task import Net, score

app = ServerApp()


@app.main()
def main(grid, context):
    model = Net()
    config = context.run_config

    def test(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = score(model.eval(), 8)
        print(f"MARK {{time.time()}}", flush=True)
        return MetricRecord({{"accuracy": accuracy}})

    strategy = {strategy}(
        {given}fraction_evaluate=float(config["evaluate"]), min_available_nodes=2,
    )
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["rounds"], evaluate_fn=test,
    )
"""
PLAIN = {
    "client": {
        "name": "plain",
        "imports": "",
        "receive": "model = Net()\n"
        "    model.load_state_dict(message.content['arrays'].to_torch_state_dict())",
        "reply": "content = {'arrays': ArrayRecord(model.state_dict()), "
        "'metrics': MetricRecord({'loss': loss, 'num-examples': 100})}\n"
        "    return Message(RecordDict(content), reply_to=message)",
    },
    "server": {
        "imports": "from flwr.serverapp.strategy import FedAvg",
        "strategy": "FedAvg",
        "given": "",
    },
}
NORM = {
    "client": {
        "name": "norm",
        "imports": "import fednorm.flower",
        "receive": "model = fednorm.flower.unpack(message, Net(), context)",
        "reply": "return fednorm.flower.pack("
        "model, message, context, examples=100, metrics={'loss': loss})",
    },
    "server": {
        "imports": "import fednorm.flower",
        "strategy": "fednorm.flower.NormStrategy",
        "given": "'fbn', model=model, ",
    },
}
Times: TypeAlias = dict[str, list[float]]
EXPERIMENT = {
    "strategies": ["fbn"], "seeds": 1, "clients": 2, "model": "resnet20", "batch_size": 20,
    "algorithm": {"name": "fedavg", "lr": 0.05}, "local_steps": 5, "eval_every": 1,
    "engine": "flower", "timeout": 120,
}  # fmt: skip


def write_app(folder: Path, parts: dict[str, dict[str, str]], config: dict[str, float]) -> Path:
    """Write a Flower app and return its folder."""
    package = folder / "compared"
    package.mkdir(parents=True)
    files = {"__init__": "", "task": TASK}
    files |= {"client_app": CLIENT.format(**parts["client"])}
    files |= {"server_app": SERVER.format(**parts["server"])}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    names = {f"{kind}app": f"compared.{kind}_app:app" for kind in ("server", "client")}
    content = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": folder.name, "version": "1.0.0", "license": "Apache-2.0", "dependencies": [],
        },
        "tool": {"flwr": {"app": {"publisher": "fednorm", "components": names, "config": config}}},
    }  # fmt: skip
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return folder


def time_app(deployment: Deployment, app: Path) -> list[float]:
    """Run an app; return the seconds of its rounds, without the first."""
    env = os.environ | QUIET | {"FLWR_HOME": str(deployment.folder / "cli")}
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(app), "here", "--stream"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    marks = [float(found) for found in re.findall(r"MARK ([\d.]+)", done.stdout)]
    if not marks[2:]:
        raise RuntimeError(done.stdout[-4000:])
    return differ(marks[1:])  # the first one is before the first round


def time_command(deployment: Deployment, rounds: int, out: Path) -> list[float]:
    """Run an experiment as `fednorm run --engine flower --superlink` does."""
    marks: list[float] = []

    def note(event: Event) -> None:
        del event
        marks.append(time.time())

    link = SuperLink(deployment.address, deployment.folder / "ca.crt")
    submit(build_experiment({**EXPERIMENT, "rounds": rounds}), link, out, Monitor([note]))
    return differ(marks)


def differ(marks: list[float]) -> list[float]:
    """Return the seconds between marks."""
    return [after - before for before, after in itertools.pairwise(marks)]


def measure(folder: Path, given: argparse.Namespace) -> tuple[Times, Times]:
    """Return the seconds of rounds, and the CPU seconds of messages, by contender."""
    config = {"rounds": given.rounds, "evaluate": float(given.evaluate)}
    apps = {
        "plain": write_app(folder / "plain", PLAIN, config),
        "norm": write_app(folder / "norm", NORM, config),
    }
    seconds: Times = {name: [] for name in [*apps, "run"]}
    with Deployment(folder) as deployment:
        for number in range(2):
            deployment.node(number)
        for turn in range(given.passes):
            for name in list(seconds)[:: -1 if turn % 2 else 1]:
                if name in apps:
                    seconds[name] += time_app(deployment, apps[name])
                else:
                    seconds[name] += time_command(deployment, given.rounds, folder / f"out{turn}")
                print(f"{name}: {seconds[name]}", file=sys.stderr, flush=True)
        found = re.findall(r"CPU (\w+) ([\d.]+)", deployment.log("node0") + deployment.log("node1"))
    return seconds, {name: [float(cpu) for said, cpu in found if said == name] for name in apps}


def show(titles: dict[str, str], values: Times, what: str) -> None:
    """Print the median of each contender, and its ratio to the first."""
    plain = statistics.median(next(iter(values.values())))
    for name, found in values.items():
        middle = statistics.median(found)
        print(
            f"{titles[name]:24} {middle:6.2f} {what}, {middle / plain:.2f} times plain "
            f"({len(found)} measured, {min(found):.2f} to {max(found):.2f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="let nodes test the model, too")
    parser.add_argument("--poll", type=float, help="seconds between a SuperExec's looks for work")
    chosen = parser.parse_args()
    if chosen.poll is not None:
        os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(chosen.poll)
    with tempfile.TemporaryDirectory() as place:
        rounds, messages = measure(Path(place), chosen)
    names = {"plain": "plain Flower app", "norm": "the same with fednorm", "run": "fednorm run"}
    show(names, rounds, "s a round")
    show(names, messages, "CPU s a message")
