"""What partitions, models, losses and metrics promise.

A check of a partition takes its text, as in a configuration; that of a model a function that makes
it of the shape of a sample, the number of classes and a seed.
"""

import contextlib
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fednorm.contract.combining import draw_vectors
from fednorm.contract.training import check_fields, require, require_equal
from fednorm.data.partition import create_partition, partition
from fednorm.errors import ContractError

MakeModel: TypeAlias = Callable[[tuple[int, ...], int, int], nn.Module]  # shape, classes, seed
_CLOSE = 1e-6


def split_labels(
    text: str, labels: Any, clients: int, seed: int = 0, groups: Any = None
) -> list[NDArray[np.int64]]:
    """Divide labels by the partition that a text names."""
    groups = np.arange(len(labels)) if groups is None else groups
    return partition(text, labels, clients=clients, seed=seed, groups=groups)


def _draw_labels() -> tuple[NDArray[Any], NDArray[Any]]:
    return np.arange(300) % 10, np.array([f"writer {i % 7}" for i in range(300)])


def check_partition_fields(text: str) -> None:
    """Each field has a sentence that explains it."""
    check_fields(create_partition(text))


def check_single_use(
    text: str, labels: Any = None, groups: Any = None, clients: int = 5, seed: int = 0
) -> None:
    """Every sample has exactly one client, and every client has some."""
    if labels is None:
        labels, groups = _draw_labels()
    rule = create_partition(text)
    parts = split_labels(text, labels, clients, seed, groups)
    require(len(parts) == clients, f"{rule} divides among {len(parts)} clients, not {clients}.")
    used = sorted(np.concatenate(parts).tolist())
    require(used == list(range(len(labels))), "samples are used twice or left out.")
    for client, part in enumerate(parts):
        require(part.dtype == np.int64, f"client {client} has indices of {part.dtype}, not int64.")
        require(len(part), f"client {client} has no sample.")
        require((np.diff(part) > 0).all(), f"the indices of client {client} are not sorted.")


def check_seed(text: str) -> None:
    """The seed alone decides the partition."""
    labels, groups = _draw_labels()
    before = np.random.get_state()  # noqa: NPY002 (the global generator must not matter)
    try:
        parts = []
        for state in (1, 2):
            np.random.seed(state)  # noqa: NPY002 (as above)
            parts.append(split_labels(text, labels, 5, 3, groups))
    finally:
        np.random.set_state(before)  # noqa: NPY002 (as above)
    same = all(map(np.array_equal, *parts))
    require(same, "the same seed gives another partition; draw from the `rng` that split gets.")


def check_arguments(text: str) -> None:
    """Labels and groups are left alone."""
    labels, groups = np.arange(60) % 3, np.arange(60) % 7
    split_labels(text, labels, 3, groups=groups)
    kept = np.array_equal(labels, np.arange(60) % 3) and np.array_equal(groups, np.arange(60) % 7)
    require(kept, "split changes its arguments in place; copy them.")


def check_extremes(text: str) -> None:
    """A single client has everything."""
    (part,) = split_labels(text, np.arange(20) % 2, 1)
    require(part.tolist() == list(range(20)), "one client of one does not have all samples.")


def check_views(text: str) -> None:
    """What a client sees has the shape and type of the samples, and is the same every time."""
    x = draw_vectors(4, (3, 9, 9)).abs()
    before, rule = x.clone(), create_partition(text)
    for client in range(3):
        seen = rule.transform(x, client, 3, seed=0)
        told = f"transform makes {tuple(seen.shape)}, {seen.dtype} of {tuple(x.shape)}, {x.dtype}."
        require(seen.shape == x.shape and seen.dtype is x.dtype, told)
        again = rule.transform(x, client, 3, seed=0)
        require_equal(again, seen, f"client {client} sees something else the second time")
    require_equal(x, before, "transform changes the samples in place; return new ones")


PARTITION_CHECKS = (
    check_partition_fields,
    check_single_use,
    check_seed,
    check_arguments,
    check_extremes,
    check_views,
)


def check_scores(make: MakeModel) -> None:
    """It maps a batch to one score per class, and every parameter gets a gradient."""
    shape, classes = (3, 16, 16), 4
    model = make(shape, classes, 0)
    scores = model(draw_vectors(8, shape, torch.float32))
    told = f"of 8 samples of shape {shape} and {classes} classes it makes {tuple(scores.shape)}."
    require(scores.shape[:2] == (8, classes), told)
    target = (torch.arange(8) % classes).view(8, *[1] * (scores.dim() - 2)).expand_as(scores[:, 0])
    nn.functional.cross_entropy(scores, target).backward()  # type: ignore[no-untyped-call]
    for path, parameter in model.named_parameters():
        grad = parameter.grad
        require(grad is not None and grad.any(), f"{path} gets no gradient; is it used?")


def check_model_seed(make: MakeModel) -> None:
    """The seed alone decides the initial weights."""
    first, second = (make((3, 16, 16), 4, 3).state_dict() for _ in range(2))
    for key, tensor in first.items():
        require_equal(second[key], tensor, f"{key} is another one with the same seed")


def check_model_evaluation(make: MakeModel) -> None:
    """In evaluation mode a sample is scored by itself."""
    model, x = make((3, 16, 16), 4, 0).eval(), draw_vectors(4, (3, 16, 16), torch.float32)
    with torch.no_grad():
        told = "scores change with the other samples of the batch"
        require_equal(model(x)[:1], model(x[:1]), told, 1e-4)


def check_model_loading(make: MakeModel) -> None:
    """A saved model loads strictly and says the same."""
    model, other = make((3, 16, 16), 4, 0), make((3, 16, 16), 4, 1)
    x = draw_vectors(2, (3, 16, 16), torch.float32)
    with torch.no_grad():
        model(x)  # so that running statistics are other than at the start
        other.load_state_dict(model.state_dict(), strict=True)
        told = "the state_dict is not all that the model has; register buffers"
        require_equal(other.eval()(x), model.eval()(x), told)


def check_model_copies(make: MakeModel) -> None:
    """It can be copied and sent to worker processes."""
    model = make((3, 16, 16), 4, 0)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301 (our own bytes)
    require(set(copied.state_dict()) == set(model.state_dict()), "a copy has other tensors.")


MODEL_CHECKS = (
    check_scores,
    check_model_seed,
    check_model_evaluation,
    check_model_loading,
    check_model_copies,
)


def _draw_outputs(function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Return scores with labels, numbers, or several labels: the first that the function takes."""
    outputs, labels = draw_vectors(8, (4,), torch.float32), torch.arange(8) % 4
    several = (outputs.roll(1, 0) > 0).float()
    kinds = [(outputs, labels), (outputs[:, 0].clone(), outputs[:, 1].clone()), (outputs, several)]
    for kind in kinds:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("error", UserWarning)  # torch broadcasts with no more than that
            _call(function, *(tensor.clone() for tensor in kind))
            return kind
    return kinds[0]


def _call(function: Any, outputs: Tensor, targets: Tensor) -> Any:
    """Call a function, or begin anew, update and compute, as torchmetrics does."""
    if not hasattr(function, "update"):
        return function(outputs, targets)
    function.reset()
    function.update(outputs, targets)
    return function.compute()


def _tell_shapes(outputs: Tensor, targets: Tensor) -> str:
    return f"of outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} it makes"


def check_loss_value(loss: Callable[..., Any]) -> None:
    """It is one finite number, as a tensor through which gradients flow."""
    outputs, targets = _draw_outputs(loss)
    outputs.requires_grad_()
    value = loss(outputs, targets)
    told = f"{_tell_shapes(outputs, targets)} {type(value).__name__}"
    single = isinstance(value, Tensor) and value.numel() == 1
    require(single, f"{told}; return the mean over the samples as a tensor.")
    require(torch.isfinite(value).all(), f"it is {value.item()}.")
    require(value.requires_grad, "no gradient flows through it; do not call .item() or .detach().")
    value.backward()
    grad = outputs.grad
    finite = grad is not None and torch.isfinite(grad).all()
    require(finite and grad is not None and grad.any(), "the gradient is 0 or not finite.")


def check_loss_mean(loss: Callable[..., Any]) -> None:
    """It is a mean over samples: neither their order nor each of them twice changes it."""
    outputs, targets = _draw_outputs(loss)
    value = loss(outputs, targets)
    twice = loss(torch.cat([outputs, outputs]), torch.cat([targets, targets]))
    told = "with each sample twice it is another number; divide by the number of samples"
    require_equal(twice, value, told, 1e-4)
    require_equal(loss(outputs.flip(0), targets.flip(0)), value, "the order matters", 1e-4)


LOSS_CHECKS = (check_loss_value, check_loss_mean)


def _measure(metric: Any, outputs: Tensor, targets: Tensor) -> float:
    value = _call(metric, outputs, targets)
    try:
        return float(value)
    except (TypeError, ValueError):
        told = f"{_tell_shapes(outputs, targets)} {type(value).__name__}; return a number."
        raise ContractError(told) from None


def check_metric_value(metric: Any) -> None:
    """It is one number, the same every time, and leaves its arguments alone."""
    if inspect.isclass(metric):
        metric = metric()
    outputs, targets = _draw_outputs(metric)
    before = outputs.clone(), targets.clone()
    first, second = (_measure(metric, outputs, targets) for _ in range(2))
    require(np.isfinite(first), f"it is {first}.")
    require(first == second, f"the second time it is {second} instead of {first}.")
    require_equal(outputs, before[0], "it changes the outputs in place")
    require_equal(targets, before[1], "it changes the targets in place")


def check_metric_order(metric: Any) -> None:
    """The order of samples does not matter."""
    outputs, targets = _draw_outputs(metric)
    first = _measure(metric, outputs, targets)
    second = _measure(metric, outputs.flip(0), targets.flip(0))
    require(abs(first - second) <= _CLOSE * (1 + abs(first)), f"it is {first}, then {second}.")


METRIC_CHECKS = (check_metric_value, check_metric_order)
