"""The loss and metrics of a run, named in a configuration or given as objects; a model object.

A name is "package.module:function". A class is created with the other keys of its table,
`{name = "torch.nn:HuberLoss", delta = 2.0}`, and a function gets them as further arguments. Of a
model given as an object, a configuration says how it is made.
"""

import inspect
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fednorm.core.algorithm import Loss
from fednorm.core.targets import LOSSES, Metrics, drop_last_axis
from fednorm.core.task import Task, isolated_rng
from fednorm.data import Dataset
from fednorm.data.given_data import read_data
from fednorm.data.transforms import Batch
from fednorm.engines.evaluation import score
from fednorm.errors import ConfigError, ConversionError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import Spec
from fednorm.names import find_plugin, importable_directory, name_class, warn_once
from fednorm.nn.copies import copy_model, refuse_uncopyable
from fednorm.objects import OBJECT, find_object, hash_parts
from fednorm.strategies.dualbn import DualBN

_CLOSE = 1e-3  # relative difference of two losses that count as equal
_MAIN = b"__main__"  # in the pickle of what a script or a session defines
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SOME = 64  # test samples on which metrics are tried


class NamedCallable:
    """A function or class that a configuration names; another process imports it anew."""

    def __init__(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        self.recipe = (kind, name, dict(fields))
        self.made: Any
        with importable_directory():
            found = find_plugin(kind, name)
            try:
                if inspect.isclass(found):
                    self.made = found(**fields)
                else:
                    self.made = partial(found, **fields) if fields else found
            except TypeError as error:
                raise ConfigError(f"{kind} {name!r} with {dict(fields)}: {error}.") from error

    def __reduce__(self) -> tuple[type["NamedCallable"], tuple[Any, ...]]:
        """Send the name, as the module may not be importable from elsewhere."""
        return NamedCallable, self.recipe

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """Call what was found."""
        return self.made(outputs, targets)


@dataclass(frozen=True)
class UserLoss:
    """A loss of the user's; outputs [n, 1] fit targets [n]."""

    function: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.function(drop_last_axis(outputs, targets), targets)


def make_loss(experiment: Experiment, data: Dataset, device: torch.device) -> Loss:
    """Return the loss of an experiment, or the usual one for the targets of its data."""
    if experiment.loss is None:
        return LOSSES[data.target or "class"]
    made = _find_callable("loss", experiment.loss)
    inner = made.made if isinstance(made, NamedCallable) else made
    if isinstance(inner, nn.Module):
        if any(p.requires_grad for p in inner.parameters()):
            raise ValueError(
                f"loss {experiment.loss.name!r} has parameters, which no client would train; make "
                "them part of the model, or turn requires_grad off."
            )
        moved = deepcopy(inner).to(device, getattr(torch, experiment.dtype))
        if not isinstance(made, NamedCallable):
            return UserLoss(moved)
        made.made = moved
    return UserLoss(made)


def make_metrics(experiment: Experiment, data: Dataset) -> Metrics:
    """Return what a test of an experiment measures."""
    named = {}
    for name, spec in (experiment.metrics or {}).items():
        found = _find_callable("metric", spec)
        named[name] = found.made if isinstance(found, NamedCallable) else found
    return Metrics(data.target, named)


def _find_callable(kind: str, spec: Spec) -> Any:
    if spec.name.startswith(OBJECT):
        return find_object(kind, spec.name, str(spec.fields.get("content")))
    return NamedCallable(kind, spec.name, spec.fields)


@torch.no_grad()
def check_loss(task: Task, name: str, batch: Batch) -> None:
    """Refuse a loss that returns no number; `dualbn` needs a mean over samples."""
    x, y = batch
    try:
        outputs = task.model.eval()(x)
    except (RuntimeError, ValueError, LookupError):
        return  # a step of training says what is wrong
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # torch broadcasts with no more than that
            value = task.loss(outputs, y)
    except Exception as error:
        raise ValueError(
            f"loss {name!r} failed on outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(y.shape)} ({y.dtype}): {error}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ValueError(
            f"loss {name!r} must return one number as a tensor, the mean over the batch, but "
            f"returned a {type(value).__name__} {shape}".rstrip()
            + "."
        )
    twice = task.loss(torch.cat([outputs, outputs]), torch.cat([y, y]))
    if not torch.isfinite(value) or torch.isclose(twice, value, rtol=_CLOSE, atol=_CLOSE**2):
        return
    said = (
        f"loss {name!r} is not a mean over the samples of a batch: with each sample twice it is "
        f"{float(twice):.4g} instead of {float(value):.4g}"
    )
    if isinstance(task.strategy, DualBN):
        reason = "'dualbn' needs a mean, as it scales gradients to one sample"
        raise ValueError(f"{said}; {reason}.")  # noqa: TRY004 (the loss is wrong, not a type)
    warn_once(f"{said}; clients with larger batches take larger steps.")


def try_metrics(task: Task, data: Dataset) -> None:
    """Try the user's metrics on a few test samples, before any training."""
    x, y = next(iter(data.test_batches()))
    score(task.model.eval(), [(x[:_SOME], y[:_SOME])], task.loss, task.metrics)


def record_objects(
    settings: Mapping[str, Any], workers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace objects in settings by what a configuration says of them; return both."""
    found, held = dict(settings), dict[str, Any]()
    data = found.get("data")
    named = isinstance(data, str | Spec) or (
        isinstance(data, dict) and ("name" in data or "train" not in data)
    )
    if data is not None and not named:
        found |= _record_data(data, found, held)
    if callable(found.get("loss")):
        found["loss"] = _record_callable("loss", found["loss"], held, workers)
    metrics = found.get("metrics")
    if metrics is not None and not isinstance(metrics, str):
        if not isinstance(metrics, Mapping | list | tuple):
            metrics = [metrics]
        pairs = metrics.items() if isinstance(metrics, Mapping) else ((None, m) for m in metrics)
        found["metrics"] = _name_metrics(pairs, held, workers)
    return found, held


def _name_metrics(pairs: Any, held: dict[str, Any], workers: int) -> dict[str, Any] | list[Any]:
    named, plain = {}, []
    for name, metric in pairs:
        recorded = metric
        if not isinstance(metric, str | Mapping | Spec):
            recorded = _record_callable("metric", metric, held, workers)
        if name is None and recorded is metric:
            plain.append(metric)
        else:
            named[name or _name_callable(metric).rpartition(".")[2]] = recorded
    return [*plain, *({"label": key, **value} for key, value in named.items())] if plain else named


def _record_data(data: Any, settings: Mapping[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that data as an object decide: itself, and its clients."""
    if isinstance(data, Path):
        return {"data": {"name": "folder", "root": str(data)}, **_divide(data, settings)}
    read = read_data(data)
    if isinstance(read, Dataset):
        content, divided, clients = hash_parts(_list_dataset(read)), read.given, read.groups
    else:
        content, divided = hash_parts(read.list_content()), read.divided
        clients = read.train.clients
    held[content] = read
    given: dict[str, Any] = {"data": {"name": f"{OBJECT}{read.name}", "content": content}}
    if divided and clients is not None and "partition" not in settings:
        given["partition"] = "natural"
        if "clients" not in settings:
            given["clients"] = len(set(clients.tolist()))
    return given


def _divide(root: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return one client for each folder, unless the user divides them otherwise."""
    if "partition" in settings or not root.is_dir():
        return {}
    folders = sum(path.is_dir() for path in root.iterdir())
    return {"partition": "natural", **({} if "clients" in settings else {"clients": folders})}


def _list_dataset(data: Dataset) -> Iterator[bytes]:
    for tensor in (data.x, data.y, data.x_test, data.y_test):
        yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    yield repr((data.transform, data.classes, data.target)).encode()
    yield "\n".join(map(str, () if data.groups is None else data.groups)).encode()


def _name_callable(value: Any) -> str:
    inner = value.func if isinstance(value, partial) else value
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def _record_callable(kind: str, value: Any, held: dict[str, Any], workers: int) -> dict[str, str]:
    """Return what a configuration says of a loss or metric: its name, and a hash of what it is."""
    if inspect.isclass(value):
        raise ConfigError(
            f"{kind} {value.__name__!r} is a class; give an instance of it, {value.__name__}(…)."
        )
    name = _name_callable(value)
    _check_sendable(kind, name, value, workers)
    content = hash_parts([kind.encode(), name.encode(), *_list_callable(value)])
    held[content] = value
    return {"name": f"{OBJECT}{name}", "content": content}


def _check_sendable(kind: str, name: str, value: Any, workers: int) -> None:
    if workers > 1 and not _is_sendable(value):
        raise ConfigError(
            f"{kind} {name!r} cannot be sent to other processes; define it at the top of a module, "
            'name it as "package.module:function", or use workers=1.'
        )


def _is_sendable(value: Any) -> bool:
    """Return whether another process can make it: it imports a script again, but no session."""
    try:
        if _MAIN not in pickle.dumps(value):
            return True
        # What stands under `if __name__ == "__main__":` is not made again.
        guarded = inspect.isroutine(value) and inspect.getsource(value)[:1].isspace()
    except Exception:  # noqa: BLE001 (an object of the user's may raise anything)
        return False
    script = getattr(sys.modules["__main__"], "__file__", "")  # "<stdin>" if it was piped
    return Path(script or "").is_file() and not guarded


def _list_callable(value: Any) -> Iterator[bytes]:
    """Yield the source of a function, and the values that it holds."""
    inner = value.func if isinstance(value, partial) else value
    try:
        yield inspect.getsource(inner if inspect.isroutine(inner) else type(inner)).encode()
    except (OSError, TypeError):  # typed into a session, or compiled
        yield _name_callable(value).encode()
    if isinstance(inner, nn.Module):
        yield from list_content(inner)
    kept: list[Any] = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)]
    kept += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    kept += [vars(inner)] if hasattr(inner, "__dict__") and not isinstance(inner, nn.Module) else []
    kept += [value.args, value.keywords] if isinstance(value, partial) else []
    yield re.sub(r"0x[0-9a-f]+", "", repr(kept)).encode()


ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module]


def make_from_object(model: ModelSource, seed: int) -> nn.Module:
    """Return a copy of the user's module, or what the function makes, seeded as a named model."""
    if isinstance(model, nn.Module):
        return copy_model(model)  # `.to` changes a module in place
    with isolated_rng(seed):
        return model()


def name_function(model: Any) -> Any:
    """Return the name of a function that needs the data's shape or classes; else the model."""
    if isinstance(model, nn.Module) or not inspect.isroutine(model) | inspect.isclass(model):
        return model
    given = inspect.signature(model).parameters.values()
    needed = [p.name for p in given if p.default is p.empty and p.kind not in _REST]
    if not needed:
        return model
    if set(needed) <= {"shape", "classes"} and (name := name_class(model)):
        return name
    raise ConfigError(
        f"model {model.__qualname__!r} needs {', '.join(needed)}; a function or class in Python is "
        "called without arguments: give a network, or lambda: a call of it. One of a file that is "
        "imported may need shape and classes of the data."
    )


def describe_object(model: ModelSource, workers: int = 1) -> dict[str, str]:
    """Return what a recorded config says of a model object: its class, and hashes.

    `source` is that of its classes and function, `content` of its layers and initial weights. A
    model for several `workers` must be one that they can be sent.

    >>> describe_object(nn.Linear(1, 1))["name"]
    'object:torch.nn.modules.linear.Linear'
    """
    try:
        made = make_from_object(model, 0)
        refuse_uncopyable(made)
    except ConversionError as error:
        raise ConfigError(f"the model cannot be used: {error}") from error
    kind = type(made)
    _check_sendable("model", f"{kind.__module__}.{kind.__qualname__}", model, workers)
    return {
        "name": f"{OBJECT}{kind.__module__}.{kind.__qualname__}",
        "source": hash_parts(list_sources(model, made)),
        "content": hash_parts(list_content(made)),
    }


def list_sources(model: ModelSource, made: nn.Module) -> Iterator[bytes]:
    """Yield the source of a model's classes, and of the function that makes it."""
    kinds: list[Any] = sorted({type(m) for m in made.modules()}, key=lambda kind: kind.__qualname__)
    for source in (*kinds, *(() if isinstance(model, nn.Module) else (model,))):
        if not getattr(source, "__module__", "").startswith("torch."):
            try:
                yield inspect.getsource(source).encode()
            except (OSError, TypeError):  # typed into a session, or compiled
                yield getattr(source, "__qualname__", "").encode()


def list_content(made: nn.Module) -> Iterator[bytes]:
    """Yield what a module's layers and tensors are."""
    yield re.sub(r"0x[0-9a-f]+", "", repr(made)).encode()
    for key, tensor in made.state_dict().items():
        yield f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
