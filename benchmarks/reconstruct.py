"""What a client's first layer tells of its batch: the mean image, from the statistics it sends.

    python benchmarks/reconstruct.py      # docs/reconstruct.png, and the table of docs/privacy.md

Ten clients with one class each take one step of FBN from the initial weights, with batches of 1, 8
and 64 images. The server knows the weights and is sent the mean of every channel of the first
BatchNorm layer's input. It looks for the image that gives these means, by least squares. After a
linear layer the mean of the outputs is the output of the mean image, so that
the answer is exact if there are as many numbers as pixels.

It does so with what a client sends ("plain"); with the statistics in units of the shared ones,
(μ-r)/√v and log σ²/v over all layers, clipped as one vector to length 1 ("clipped"); with Gaussian
noise of that length in every number as well ("noise"); and with the secure sum over ten clients,
whose mean it takes for each client's. The numbers are correlations with the mean of the client's
own images, averaged over the clients. "guess" is the mean image of all clients' data, for which the
server needs nothing of this client; "update" divides the gradient of the first linear layer's
weights by that of its bias, which needs no statistics.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from fednorm import (
    Batches,
    ClientState,
    Reply,
    Task,
    broadcast,
    client_round,
    create_algorithm,
    create_strategy,
    load_dataset,
    partition,
)
from fednorm.core.replies.secure_sum import sum_replies
from fednorm.data import Dataset

CLIENTS, SIZES = 10, (1, 8, 64)
CLIP, NOISE = 1.0, 1.0
STEPS = 40  # of Gauss and Newton, through layers that are not linear
IMAGE = Path(__file__).parents[1] / "docs" / "reconstruct.png"
VIEWS = ("plain", "clipped", "noise", "secure")


@dataclass(frozen=True)
class Case:
    """A data set, and the first layers of a network up to its first BatchNorm."""

    title: str
    data: str
    front: Callable[[int], nn.Module]  # from the number of pixels
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d
    channels: int = 128
    shown: bool = False  # in the image


def flat_linear(channels: int, *after: nn.Module) -> Callable[[int], nn.Module]:
    """Return the front of a perceptron."""
    return lambda pixels: nn.Sequential(nn.Flatten(), nn.Linear(pixels, channels), *after)


CASES = (
    Case("digits, linear, 128 channels", "digits", flat_linear(128), shown=True),
    Case("digits, linear, 32 channels", "digits", flat_linear(32), channels=32),
    Case("digits, linear and ReLU (`mlp`), 128 channels", "digits", flat_linear(128, nn.ReLU())),
    Case(
        "digits, 3×3 convolution (`cnn`), 16 channels",
        "digits",
        lambda _: nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d,
        16,
    ),
    Case(
        "Fashion-MNIST, linear, 1024 channels",
        "fashion_mnist",
        flat_linear(1024),
        channels=1024,
        shown=True,
    ),
    Case("Fashion-MNIST, linear, 128 channels", "fashion_mnist", flat_linear(128)),
)


def load(name: str) -> tuple[Dataset, list[Tensor]]:
    """Return a data set, and every client's images: one class each."""
    fields = {"train": 6000, "test": 500} if name == "fashion_mnist" else {}
    data = load_dataset(name, seed=0, **fields)
    parts = partition("gamma=0", data.y, clients=CLIENTS, seed=0)
    return data, [as_pixels(data.x[torch.as_tensor(part)]) for part in parts]


def as_pixels(images: Tensor) -> Tensor:
    """Return images with values from 0 to 1."""
    return images.double() / (1.0 if images.is_floating_point() else 255.0)


def build_task(case: Case, pixels: int) -> Task:
    """Return FBN on a network that begins as the case says."""
    torch.manual_seed(0)
    front = case.front(pixels)
    model = nn.Sequential(
        front, case.norm(case.channels), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    side = round(pixels**0.5)
    model(torch.zeros(2, 1, side, side))  # which makes the last layer
    algorithm = create_algorithm("dsgd", lr=0.05)
    return Task.build(model.double(), create_strategy("fbn"), algorithm)


def collect_replies(task: Task, images: Sequence[Tensor]) -> list[Reply]:
    """Return what every client sends after one step; client i has the label i."""
    received = broadcast(task, task.initial_state)
    labels = [torch.full((len(x),), i) for i, x in enumerate(images)]
    pairs = enumerate(zip(images, labels, strict=True))
    own = [Batches(i, [(x, y)], examples=len(x)) for i, (x, y) in pairs]
    return [client_round(task, received, ClientState(), batches)[0] for batches in own]


def find_image(
    task: Task, means: Tensor, shape: Sequence[int], *, ridge: float, clipped: bool
) -> Tensor:
    """Return the image that gives these means of the first BatchNorm layer's input.

    By how much clipping has shrunk them is not known: it is looked for as well. Gauss-Newton steps,
    of which one is enough where the layers before the statistics are linear.
    """
    front, shared = task.model[0], next(iter(task.initial_state.running.values())).mean
    linear = not any(isinstance(module, nn.ReLU) for module in front.modules())

    def measure(pixels: Tensor) -> Tensor:
        return front(pixels.view(1, *shape)).transpose(0, 1).flatten(1).mean(1)

    grey = torch.full((math.prod(shape),), 0.5, dtype=torch.float64)
    image = grey
    for _ in range(1 if linear else STEPS):
        slope = torch.func.jacrev(measure)(image).detach()
        offset = (measure(image) - slope @ image).detach() - shared
        system = slope.T @ slope + ridge * torch.eye(len(grey), dtype=torch.float64)
        goals = torch.stack([ridge * grey - slope.T @ offset, slope.T @ (means - shared)], dim=1)
        fixed, along = torch.linalg.solve(system, goals).unbind(1)  # the image is fixed + t·along
        stretch = 1.0
        if clipped:
            error = torch.cat([slope @ fixed + offset, ridge**0.5 * (fixed - grey)])
            change = torch.cat([slope @ along - (means - shared), ridge**0.5 * along])
            stretch = max(1.0, -float(error @ change) / float(change @ change))
        image = image + (1.0 if linear else 0.5) * (fixed + stretch * along - image)
    return image.view(*shape).clamp(0, 1)


def clip_statistics(task: Task, reply: Reply) -> Tensor:
    """Return the first layer's means, after all statistics were clipped as one vector."""
    shared = task.initial_state.running
    parts = []
    for path, report in reply.stats.items():
        running, own = shared[path], report.moments
        parts.append((own.mean - running.mean) / running.var.sqrt())
        parts.append((own.var.clamp_min(1e-5) / running.var).log())
    vector = torch.cat(parts)
    factor = min(1.0, CLIP / float(vector.norm()))
    first = next(iter(shared.values()))
    return first.mean + factor * parts[0] * first.var.sqrt()


def view(task: Task, replies: Sequence[Reply]) -> dict[str, list[Tensor]]:
    """Return the means of the first layer of every client as the server sees them."""
    path = next(iter(task.initial_state.running))
    scale = task.initial_state.running[path].var.sqrt()
    clipped = [clip_statistics(task, reply) for reply in replies]
    draw = torch.Generator().manual_seed(0)
    noise = [
        NOISE * CLIP * scale * torch.randn(m.shape, generator=draw, dtype=m.dtype) for m in clipped
    ]
    summed = sum_replies(task, task.initial_state, replies).reply
    return {
        "plain": [reply.stats[path].moments.mean for reply in replies],
        "clipped": clipped,
        "noise": [m + n for m, n in zip(clipped, noise, strict=True)],
        "secure": [summed.stats[path].moments.mean] * len(replies),
    }


def correlate(one: Tensor, other: Tensor) -> float:
    """Return the correlation of two images' pixels; 0 if one of them is plain."""
    both = torch.stack([one.flatten(), other.flatten()])
    return float(torch.corrcoef(both).nan_to_num(0.0)[0, 1])


def divide_gradients(reply: Reply, shape: Sequence[int]) -> Tensor:
    """Return the ratio of the first layer's gradients: of one image it is the image."""
    weight, bias = reply.update["0.1.weight"], reply.update["0.1.bias"]
    row = int(bias.abs().argmax())
    return (weight[row] / bias[row]).view(*shape)


def measure_case(case: Case) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, Tensor]]]:
    """Return the correlations by batch size, and the images of one client."""
    data, clients = load(case.data)
    shape = tuple(data.shape)
    everyone = torch.cat(clients).mean(0)
    found: dict[int, dict[str, float]] = {}
    shown: dict[int, dict[str, Tensor]] = {}
    for size in SIZES:
        images = [own[:size] for own in clients]
        true = [own.mean(0) for own in images]
        task = build_task(case, images[0][0].numel())
        replies = collect_replies(task, images)
        results: dict[str, list[Tensor]] = {"guess": [everyone] * CLIENTS}
        for name, means in view(task, replies).items():
            ridge = (NOISE * CLIP) ** 2 if name == "noise" else 1e-9
            solve = partial(find_image, task, shape=shape, ridge=ridge, clipped=name == "clipped")
            results[name] = [solve(mean) for mean in means]
        if "0.1.weight" in replies[0].update:
            results["update"] = [divide_gradients(reply, shape) for reply in replies]
        pairs = {name: zip(made, true, strict=True) for name, made in results.items()}
        found[size] = {
            name: fmean(correlate(a, b) for a, b in pair) for name, pair in pairs.items()
        }
        shown[size] = {"mean image": true[3], **{name: results[name][3] for name in VIEWS}}
    return found, shown


def print_table(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    """Print correlations as a table; each cell has one for each batch size."""
    columns = (*VIEWS, "guess", "update")
    print(f"| first layer | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for title, sizes in found.items():
        cells = [[own[name] for own in sizes.values() if name in own] for name in columns]
        texts = [" / ".join(f"{value:.2f}" for value in cell) or "–" for cell in cells]
        print(f"| {title} | {' | '.join(texts)} |")


def draw(shown: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> None:
    """Save the images of one client: a row for each batch size, a column for each view."""
    mpl.use("agg")
    figure, axes = plt.subplots(len(SIZES) * len(shown), 1 + len(VIEWS), figsize=(5.2, 6.6))
    rows = [(title, size) for title in shown for size in SIZES]
    for row, (title, size) in zip(axes, rows, strict=True):
        for axis, (name, image) in zip(row, shown[title][size].items(), strict=True):
            axis.imshow(image[0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if (title, size) == rows[0]:
                axis.set_title(name, fontsize=9)
        row[0].set_ylabel(f"batch {size}", fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(IMAGE, dpi=90)
    print(f"{IMAGE.name}: {IMAGE.stat().st_size} bytes")


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    torch.set_num_threads(1)
    results = {case.title: measure_case(case) for case in CASES}
    print_table({title: found for title, (found, _) in results.items()})
    draw({case.title: results[case.title][1] for case in CASES if case.shown})


if __name__ == "__main__":
    main()
