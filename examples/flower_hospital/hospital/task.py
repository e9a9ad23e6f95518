"""The network, the images, and an ordinary training loop: nothing in here is about Flower."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fednorm import create_model
from fednorm.data import Dataset, load_dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as torchvision has them


def build_model(config: Mapping[str, object]) -> nn.Module:
    """Return a ResNet-18, with the weights of a file if the configuration names one."""
    size, classes = int(str(config["image-size"])), str(config["classes"]).split(",")
    model = create_model("resnet18", (3, size, size), len(classes), seed=0, stem="imagenet")
    if config["weights"]:
        load_pretrained(model, Path(str(config["weights"])))
    return model


def load_pretrained(model: nn.Module, path: Path) -> None:
    """Load all weights but those of a classifier for other classes."""
    safe = path.suffix == ".safetensors"
    stored = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    own = model.state_dict()
    fitting = {k: v for k, v in stored.items() if k in own and v.shape == own[k].shape}
    other = own.keys() - fitting.keys() - {"fc.weight", "fc.bias"}
    if other:
        raise ValueError(f"{path} holds no ResNet-18: {sorted(other)[:3]} … do not fit.")
    model.load_state_dict(own | fitting)


def load_images(folder: Path, config: Mapping[str, object]) -> Dataset:
    """Return the images in FOLDER/CLASS/*.png, a fifth of each class held out for tests.

    Decoded images are cached, because Flower starts a process for each message.
    """
    wanted = sorted(str(config["classes"]).split(","))
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if found != wanted:
        raise ValueError(
            f"{folder} must hold the folders {wanted}, but has {found}; a class without images is "
            "an empty folder."
        )
    return load_dataset("folder", seed=0, root=str(folder), size=int(str(config["image-size"])))


def normalize(x: Tensor) -> Tensor:
    """Return bytes as what the network takes."""
    return (x.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def make_batches(data: Dataset) -> list[tuple[Tensor, Tensor]]:
    """Return all images to train on, in order, for a pass that measures statistics."""
    return [(normalize(x), y) for x, y in zip(data.x.split(50), data.y.split(50), strict=True)]


def fit(
    model: nn.Module,
    data: Dataset,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, object],
    random: torch.Generator,
) -> float:
    """Train for the local epochs; return the mean loss of the last one."""
    model.train()
    size, losses = int(str(config["batch-size"])), [0.0]
    for _ in range(int(str(config["local-epochs"]))):
        losses = []
        for picked in torch.randperm(len(data.y), generator=random).split(size):
            if len(picked) == 1:  # BatchNorm needs two
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(normalize(data.x[picked])), data.y[picked])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def score(model: nn.Module, data: Dataset) -> dict[str, float]:
    """Return accuracy and loss on the held-out images."""
    outputs = model.eval()(normalize(data.x_test))
    loss = nn.functional.cross_entropy(outputs, data.y_test)
    right = (outputs.argmax(1) == data.y_test).double().mean()
    return {"accuracy": float(right), "loss": float(loss), "num-examples": len(data.y_test)}
