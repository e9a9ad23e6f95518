"""What is examined: the model, and the data or samples of the same shape."""

from typing import Any

import torch
from torch import nn

from fednorm.data import Dataset, load
from fednorm.experiment.config import Experiment
from fednorm.experiment.load import ConfigError
from fednorm.models import build
from fednorm.nn.copies import copy_model

CLASSES = 10  # where only the shape of a sample is given


def read_shape(text: str) -> tuple[int, ...]:
    """Read the shape of a sample.

    >>> read_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"a shape is positive whole numbers such as 3,32,32 or 64, but got {text!r}."
        )
    return shape


def is_source(model: object) -> bool:
    """Return whether a model is given as an object, not by its name."""
    return isinstance(model, nn.Module) or callable(model)


def samples(experiment: Experiment, shape: tuple[int, ...] | None, classes: int | None) -> Dataset:
    """Return the data, or samples of the given shape in its place."""
    seed, dtype = experiment.seeds[0], getattr(torch, experiment.dtype)
    data = load(experiment.data.name, seed, **experiment.data.fields)
    if shape or classes:
        labels = torch.arange(classes or CLASSES)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(labels), *(shape or data.shape), generator=generator)
        data = Dataset("random", x, labels, x, labels, len(labels))
    return data.to(experiment.device, dtype)


def network(experiment: Experiment, data: Dataset, source: Any) -> nn.Module:
    """Return a copy of the model, in the number format and on the device of the data."""
    entry, model = experiment.model, source
    if not is_source(source):
        seed = experiment.seeds[0]
        model = build(entry.name, data.shape, data.classes, seed, **entry.fields)
    elif not isinstance(source, nn.Module):
        model = source()
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, but got {type(model).__name__}.")
    return copy_model(model).to(data.look.device, data.look.dtype)
