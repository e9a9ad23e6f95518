"""Messages of a round as Flower's records, and back; nothing that arrives can run code.

An array is what `numpy.save` writes, and is read with `allow_pickle=False`. Integers stay integers.
Weights travel as one array each, under the names of the `state_dict`. Statistics have a separate
record with all layers in a row: `mean` and `var` hold the channels of all layers, `sizes` the
number of channels of each, `batches` the counters, `count` the counts of values and `samples` the
counts of samples. A layer that is called more than once in a step has one entry for each call.
Anything unexpected is refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fednorm.core.messages import (
    Broadcast,
    ClientState,
    LayerStats,
    Reply,
    RunningStats,
    ServerState,
)
from fednorm.core.moments import Moments
from fednorm.core.types import ClientId, Tensors
from fednorm.errors import WireError

WEIGHTS, METRICS = "arrays", "metrics"  # as in Flower's own examples
EXAMPLES, LOSS, OWN_METRIC = "num-examples", "loss", "metric."
HEADER = "fednorm"
BUFFERS, STATISTICS = "fednorm.buffers", "fednorm.statistics"
MOMENTUM, STRATEGY_STATE = "fednorm.momentum", "fednorm.strategy_state"
_PERSONAL, _OPTIMIZER = "fednorm.personal", "fednorm.optimizer"
VERSION = 4
_LONGEST = 300  # letters of a text that another machine sent


@contextmanager
def guard_reading() -> Iterator[None]:
    """Turn whatever goes wrong in reading a message into WireError, which rejects it alone."""
    try:
        yield
    except WireError as error:
        raise WireError(clean_text(str(error))) from error
    except Exception as error:  # a message that cannot be read is a bad message
        said = clean_text(f"it cannot be read: {type(error).__name__}: {error}")
        raise WireError(said) from error


def clean_text(text: object) -> str:
    """Return text of another machine: not too long, and without what would steer a terminal."""
    shown = " ".join(str(text).split())[:_LONGEST]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def to_array_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as a record of Flower's arrays."""
    return ArrayRecord({name: _array(name, tensor) for name, tensor in tensors.items()})


def _array(name: str, tensor: Tensor) -> Array:
    try:
        # Without contiguity a transposed weight would travel, and come back, in another order.
        return Array(tensor.detach().cpu().contiguous().numpy())
    except TypeError as error:
        raise WireError(
            f"tensor {name!r} has the type {tensor.dtype}, which numpy does not know and Flower "
            "cannot send; keep the model in float32."
        ) from error


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record; only plain numbers in numpy's own format are read."""
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    if array.stype != "numpy.ndarray":
        raise WireError(f"array {name!r} must be of type 'numpy.ndarray', but is {array.stype!r}.")
    try:
        return torch.from_numpy(array.numpy())
    except Exception as error:  # numpy has many ways to fail at bytes that it did not write
        raise WireError(f"array {name!r} cannot be read as numbers: {error}") from error


def expect(what: str, found: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Return `found` with the devices and layouts of `like`, or raise WireError."""
    if unknown := sorted(found.keys() - like.keys()):
        raise WireError(f"{what} has {unknown[0]!r}, which the model does not have.")
    if missing := sorted(like.keys() - found.keys()):
        raise WireError(f"{what} lacks {missing[0]!r}.")
    return {name: match_tensors(f"{what} {name!r}", found[name], like[name]) for name in like}


def match_tensors(what: str, found: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the device and layout of `like`, or raise WireError."""
    if found.shape != like.shape or found.dtype != like.dtype:
        raise WireError(
            f"{what} must be {like.dtype} of shape {tuple(like.shape)}, "
            f"but is {found.dtype} of shape {tuple(found.shape)}."
        )
    # The same device and the same order in memory, so that sums are taken in the same order.
    return torch.empty_like(like).copy_(found)


def _statistics(values: Sequence[RunningStats | Moments], **columns: Tensor) -> ArrayRecord:
    sizes = [[value.mean.numel(), value.var.numel()] for value in values]
    return to_array_record(
        {
            "mean": torch.cat([value.mean.flatten() for value in values]),
            "var": torch.cat([value.var.flatten() for value in values]),
            "sizes": torch.tensor(sizes),
            **columns,
        }
    )


def _split(
    record: Mapping[str, Tensor], layers: Sequence[str], columns: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """Return mean and variance of each layer, checked against the sizes that came with them."""
    wanted = {"mean", "var", "sizes", *columns}
    if record.keys() != wanted:
        raise WireError(f"statistics must have {sorted(wanted)}, but have {sorted(record)}.")
    for name in ("mean", "var"):
        if record[name].dim() != 1 or not record[name].is_floating_point():
            raise WireError(
                f"{name!r} of the statistics must be a row of real numbers, but is "
                f"{tuple(record[name].shape)} of {record[name].dtype}."
            )
    sizes, count = record["sizes"], len(layers)
    lengths = (record["mean"].numel(), record["var"].numel())
    fits = sizes.dtype == torch.int64 and sizes.shape == (count, 2) and bool((sizes >= 0).all())
    if not fits or tuple(sizes.sum(0).tolist()) != lengths:
        raise WireError(f"statistics of {count} layers have sizes {sizes.tolist()} of {lengths}.")
    for column in columns:
        wanted_type = torch.int64 if column == "batches" else torch.float64
        found = record[column]
        if found.shape != (count,) or found.dtype != wanted_type:
            raise WireError(
                f"{column!r} of the statistics of {count} layers must be as many numbers of type "
                f"{wanted_type}, but is {tuple(found.shape)} of {found.dtype}."
            )
    means, variances = (
        torch.split(record[name], sizes[:, i].tolist()) for i, name in enumerate(("mean", "var"))
    )
    return list(zip(means, variances, strict=True))


def _shape_values(found: Tensor, like: Tensor) -> Tensor:
    """Return flat numbers in the shape of `like`, if there are as many."""
    return found.view(like.shape) if found.numel() == like.numel() else found


def write_stats(record: RecordDict, stats: Mapping[str, LayerStats]) -> list[str]:
    """Write reported statistics into `record`; return the layers in order, one for each call."""
    calls = [(path, report, m) for path, report in stats.items() for m in report.calls]
    if calls:
        record[STATISTICS] = _statistics(
            [moments for _, _, moments in calls],
            count=torch.tensor([moments.count for _, _, moments in calls], dtype=torch.float64),
            samples=torch.tensor([report.samples for _, report, _ in calls], dtype=torch.float64),
            batches=torch.tensor([report.num_batches for _, report, _ in calls]),
        )
    return [path for path, _, _ in calls]


def read_stats(
    record: RecordDict, layers: Sequence[str], like: Mapping[str, RunningStats]
) -> dict[str, LayerStats]:
    """Return the statistics that `record` reports for layers of `like`."""
    if not layers:
        return {}
    found = to_tensors(read_arrays(record, STATISTICS))
    columns = ("count", "samples", "batches")
    split = _split(found, layers, columns)
    numbers = zip(*(found[column].tolist() for column in columns), strict=True)
    read: dict[str, LayerStats] = {}
    for path, pair, (count, samples, seen) in zip(layers, split, numbers, strict=True):
        if path not in like:
            raise WireError(f"statistics are of layer {path!r}, which the model does not share.")
        own = like[path]
        # Layers of several number formats travel together in the widest of them.
        mean, var = _shape_values(pair[0], own.mean).to(own.mean.dtype), pair[1].to(own.var.dtype)
        mean = match_tensors(f"the mean of layer {path!r}", mean, own.mean)
        var = match_tensors(f"the variance of layer {path!r}", var, own.var)
        moments = Moments(float(count), mean, var)
        before = read.get(path)
        if before is None:
            read[path] = LayerStats(moments, int(seen), float(samples))
        else:
            read[path] = replace(before, more=(*before.more, moments))
    return read


@dataclass(frozen=True, slots=True)
class Header:
    """The plain values of a message, by name."""

    values: Mapping[str, int | float | str | list[str]]

    def __getitem__(self, key: str) -> int | float | str | list[str]:
        if key not in self.values:
            raise WireError(f"a message must say {key!r}, but says {sorted(self.values)}.")
        return self.values[key]

    def layers(self) -> list[str]:
        """Return the layers whose statistics are in the message, in their order."""
        found = self.values.get("layers", [])
        if not isinstance(found, list):
            raise WireError(f"'layers' must be a list of names, but is {found!r}.")
        return [str(path) for path in found]


def header(record: RecordDict) -> Header:
    """Return the header of a message."""
    found = record.get(HEADER)
    if not isinstance(found, ConfigRecord):
        raise WireError(
            f"a message of fednorm has the record {HEADER!r}, but this one has "
            f"{sorted(record)}; use fednorm.flower.NormStrategy at the server and "
            "fednorm.flower.pack at the client."
        )
    if found.get("version") != VERSION:
        raise WireError(
            f"the other side speaks version {found.get('version')!r} of fednorm's messages, this "
            f"one {VERSION}; install the same fednorm on all machines."
        )
    return Header(dict(found))  # type: ignore[arg-type]  # each value is checked where it is used


def _add_arrays(record: RecordDict, parts: Mapping[str, Tensors]) -> None:
    record.update({key: to_array_record(part) for key, part in parts.items() if part})


def broadcast_records(received: Broadcast, **more: float | str) -> RecordDict:
    """Return a broadcast as records; `more` goes into its header."""
    state = received.state
    record = RecordDict({WEIGHTS: to_array_record(state.weights)})
    _add_arrays(record, {BUFFERS: state.buffers, MOMENTUM: state.momentum})
    _add_arrays(record, {STRATEGY_STATE: state.strategy_state})
    head = ConfigRecord({"version": VERSION, "round": received.round, **more})
    if received.rounds is not None:
        head["rounds"] = received.rounds
    if running := list(state.running.values()):
        batches = torch.tensor([layer.num_batches for layer in running])
        record[STATISTICS] = _statistics(running, batches=batches)
        head["layers"] = list(state.running)
    record[HEADER] = head
    return record


def reply_records(reply: Reply, **more: float | str) -> RecordDict:
    """Return a reply as records; its update is in the record of weights."""
    record = RecordDict({WEIGHTS: to_array_record(reply.update)})
    _add_arrays(record, {BUFFERS: reply.buffers, MOMENTUM: reply.momentum})
    head = ConfigRecord({"version": VERSION, "client": reply.client, **more})
    if layers := write_stats(record, reply.stats):
        head["layers"] = layers
    record[METRICS] = MetricRecord({EXAMPLES: reply.examples, LOSS: reply.loss, **reply.metrics})
    record[HEADER] = head
    return record


def read_reply(record: RecordDict, client: ClientId, state: ServerState, sent: Tensors) -> Reply:
    """Return the reply of a client to the broadcast of a state; `sent` with its update."""
    update, momentum = to_tensors(read_arrays(record, WEIGHTS)), optional(record, MOMENTUM)
    metrics = read_metrics(record)
    metrics.pop(EXAMPLES, None)
    if LOSS not in metrics:
        raise WireError(f"a reply must say its {LOSS!r}, but says {sorted(metrics)}.")
    return Reply(
        client=client,
        examples=examples_of(record),
        update=expect("the update", update, _name_parts(state.weights, update)),
        buffers=expect("the reply", optional(record, BUFFERS), state.buffers),
        stats=read_stats(record, header(record).layers(), state.running),
        momentum=expect("the momentum", momentum, _name_parts(sent, momentum)),
        loss=metrics.pop(LOSS),
        metrics=metrics,
    )


def _name_parts(known: Tensors, wanted: Tensors) -> dict[str, Tensor]:
    """Return the tensors of `known` that `wanted` names; frozen ones are not sent."""
    return {name: tensor for name, tensor in known.items() if name in wanted}


def align(received: Broadcast, like: ServerState) -> Broadcast:
    """Return a broadcast in the shapes and types of `like`, or raise WireError."""
    found = received.state
    known = {path: r.mean for path, r in like.running.items()}
    running = {
        path: replace(r, mean=_shape_values(r.mean, known[path]) if path in known else r.mean)
        for path, r in found.running.items()
    }
    expect("the received statistics", {path: r.mean for path, r in running.items()}, known)
    state = replace(
        found,
        running=running,
        weights=expect("the received model", found.weights, like.weights),
        buffers=expect("the received model", found.buffers, like.buffers),
        momentum=expect("the momentum", found.momentum, _name_parts(like.weights, found.momentum)),
    )
    return replace(received, state=state)


def read_broadcast(record: RecordDict, weights: str = WEIGHTS) -> Broadcast:
    """Return the broadcast of a record."""
    said = header(record)
    layers, rounds = said.layers(), said.values.get("rounds")
    running: dict[str, RunningStats] = {}
    if len(set(layers)) != len(layers):
        raise WireError(f"'layers' of a broadcast must be names, each once, but is {layers!r}.")
    if layers:
        found = to_tensors(read_arrays(record, STATISTICS))
        split, batches = _split(found, layers, ("batches",)), found["batches"].tolist()
        running = {
            path: RunningStats(mean, var, int(seen))
            for path, (mean, var), seen in zip(layers, split, batches, strict=True)
        }
    state = ServerState(
        round=integer(said, "round") - 1,
        weights=to_tensors(read_arrays(record, weights)),
        buffers=optional(record, BUFFERS),
        running=running,
        momentum=optional(record, MOMENTUM),
        strategy_state=optional(record, STRATEGY_STATE),
    )
    return Broadcast(state, None if rounds is None else integer(said, "rounds"))


def integer(found: Header, key: str) -> int:
    """Return an integer of a message's header."""
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{key!r} must be an integer, but is {value!r}.")
    return value


def read_arrays(record: RecordDict, key: str) -> ArrayRecord:
    """Return a record of arrays."""
    found = record.get(key)
    if not isinstance(found, ArrayRecord):
        raise WireError(f"a message must have arrays {key!r}, but has {sorted(record)}.")
    return found


def optional(record: RecordDict, key: str) -> dict[str, Tensor]:
    """Return the tensors of a record that may be missing."""
    return to_tensors(read_arrays(record, key)) if key in record else {}


def read_metrics(record: RecordDict) -> dict[str, float]:
    """Return the metrics of a message, each of which is one number."""
    found = record.get(METRICS)
    if not isinstance(found, MetricRecord):
        raise WireError(f"a message must have metrics, but has {sorted(record)}.")
    metrics: dict[str, float] = {}
    for key, value in found.items():
        if isinstance(value, list):
            raise WireError(f"metric {key!r} must be one number, but is a list.")
        metrics[key] = float(value)
    return metrics


def examples_of(record: RecordDict) -> int:
    """Return how many examples a client reports."""
    metrics = record.get(METRICS)
    found = metrics.get(EXAMPLES) if isinstance(metrics, MetricRecord) else None
    if not isinstance(found, int) or isinstance(found, bool):
        raise WireError(f"a reply must say {EXAMPLES!r} as an integer, but says {found!r}.")
    return found


def save_client_state(state: RecordDict, client_state: ClientState, tag: str = "") -> None:
    """Save a client's state in the state of its node."""
    for key, part in ((_PERSONAL, client_state.tensors), (_OPTIMIZER, client_state.optimizer)):
        if part:
            state[key + tag] = to_array_record(part)
        else:
            state.pop(key + tag, None)


def load_client_state(state: RecordDict, tag: str = "") -> ClientState:
    """Return the client state that a node keeps, an empty one at first."""
    return ClientState(optional(state, _PERSONAL + tag), optional(state, _OPTIMIZER + tag))
