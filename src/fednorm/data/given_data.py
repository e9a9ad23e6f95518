"""Data that a user gives as objects: arrays, tensors, tables, data sets of torch or Hugging Face.

`read_data` turns each of these into tensors, and says in a sentence what does not fit. A list has
one entry per client. Without test samples a share is held out, by client and class.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.targets import find_target
from fednorm.data.dataset import (
    Dataset,
    describe,
    read_inputs,
    read_targets,
    stack,
    to_array_channels_first,
)
from fednorm.data.image_dataset import hold_out
from fednorm.data.transforms import IGNORED
from fednorm.errors import ConfigError

TEST_SHARE = 0.2  # of each client and class, where no test samples are given
TARGETS = ("target", "label", "labels", "y")  # names of the column with the targets
CLIENTS = ("client", "client_id")
TEST_NAMES = ("test", "validation", "valid", "val")
_PAIR, _QUAD = 2, 4
FORMS = (
    "(x, y), (x, y, x_test, y_test), a torch or Hugging Face Dataset or a (train, test) pair of "
    "them, a pandas DataFrame with a column 'target', or a list with one (train, test) pair per "
    "client"
)


@dataclass(frozen=True)
class Samples:
    """Samples with their targets, and the client of each, if known."""

    x: Tensor
    y: Tensor
    clients: NDArray[Any] | None = None


@dataclass(frozen=True)
class GivenData:
    """The user's data as tensors; `load` makes a data set of them."""

    name: str
    train: Samples
    test: Samples | None
    divided: bool = False  # the user said which client has what

    def load(self, seed: int) -> Dataset:
        """Return the data; without test samples, hold some out by the seed."""
        train, test = self.train, self.test
        if test is None:
            train, test = _hold_out(self._make_dataset(train, train), train, seed)
        return self._make_dataset(train, test)

    def _make_dataset(self, train: Samples, test: Samples) -> Dataset:
        floats = train.y.is_floating_point()
        both = torch.cat([train.y.flatten(), test.y.flatten()])
        known = both if train.y.dtype != torch.uint8 else both[both != IGNORED]
        outputs = int(np.prod(train.y.shape[1:])) if floats else int(known.max()) + 1
        return Dataset(
            self.name,
            train.x,
            train.y,
            test.x,
            test.y,
            classes=outputs,
            groups=train.clients,
            groups_test=test.clients,
            target=find_target(self.train.y),
            given=self.divided,
        )

    def list_content(self) -> Iterator[bytes]:
        """Yield what identifies the data."""
        for part in (self.train, self.test):
            for tensor in (part.x, part.y) if part else ():
                yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
                yield tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if part and part.clients is not None:
                yield "\n".join(map(str, part.clients)).encode()


def _hold_out(whole: Dataset, train: Samples, seed: int) -> tuple[Samples, Samples]:
    kinds = whole.labels()
    if train.clients is not None:
        _, number = np.unique(train.clients, return_inverse=True)
        kinds = kinds + (int(kinds.max()) + 1) * number
    rng = make_rng(seed, Stream.GIVEN_SPLIT)
    held = hold_out(kinds, TEST_SHARE, rng)
    if not held.any():  # every kind has few samples
        held = hold_out(np.zeros_like(kinds), TEST_SHARE, rng)
    if not held.any():
        raise ConfigError(
            f"{len(kinds)} samples are too few to hold some out for testing; give test samples: "
            "(x, y, x_test, y_test)."
        )
    return _take(train, ~held), _take(train, held)


def _take(samples: Samples, chosen: NDArray[np.bool_]) -> Samples:
    numbers = np.flatnonzero(chosen)
    clients = None if samples.clients is None else samples.clients[numbers]
    return Samples(samples.x[numbers], samples.y[numbers], clients)


def read_data(value: Any, name: str = "") -> GivenData | Dataset:
    """Read data in any of the forms that users have.

    Args:
        value: the data; a function is called.
        name: how results name them; the type of `value` if not given.

    >>> read_data((np.zeros((5, 2)), [0, 1, 0, 1, 1])).load(0).classes
    2
    """
    if callable(value) and not hasattr(value, "__getitem__"):
        return read_data(value(), name or getattr(value, "__name__", ""))
    if isinstance(value, Dataset):
        return value
    name = name or _name_type(value)
    if isinstance(value, list):
        return read_clients(value, name)
    train, test = _read_split(value, name)
    _check_test(name, train, test)
    return check_classes(GivenData(name, train, test, divided=train.clients is not None))


def name_clients(data: GivenData, names: Sequence[str]) -> GivenData:
    """Return data of a list of clients with the clients' names instead of their numbers."""

    def name_them(samples: Samples) -> Samples:
        return replace(samples, clients=np.array(names)[samples.clients])

    return replace(data, train=name_them(data.train), test=data.test and name_them(data.test))


def check_classes(data: GivenData) -> GivenData:
    """Return the data; refuse training targets that all are one class."""
    y = data.train.y
    if y.dim() == 1 and not y.is_floating_point() and bool((y == y[:1]).all()):
        raise ConfigError(
            f"data: all {len(y)} training targets are class {int(y[0])}, so there is nothing to "
            "learn; give samples of at least two classes, or floats for regression."
        )
    return data


def _name_type(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "clients" if isinstance(value, list) else "arrays"
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def read_clients(clients: Sequence[Any], name: str) -> GivenData:
    """Read a list with an entry per client."""
    if not clients:
        raise ConfigError("data: the list of clients is empty; it has one entry per client.")
    parts = []
    for number, entry in enumerate(clients):
        where = f"client {number}"
        if not isinstance(entry, tuple) and not _is_data(entry):
            raise ConfigError(
                f"data: a list has one (train, test) pair per client, but entry {number} is "
                f"{describe(entry)}; arrays of all samples are a tuple (x, y)."
            )
        parts.append(_read_split(entry, where))
        _check_alike(where, parts[0][0], parts[-1][0])
        _check_test(where, *parts[-1])
    known = [test is not None for _, test in parts]
    if any(known) and not all(known):
        raise ConfigError(
            f"data: client {known.index(False)} has no test samples and client "
            f"{known.index(True)} has; give them for all clients, or for none."
        )
    train = _join([own for own, _ in parts])
    test = _join([own for _, own in parts if own]) if all(known) else None
    return check_classes(GivenData(name, train, test, divided=True))


def _join(parts: Sequence[Samples]) -> Samples:
    numbers = np.repeat(np.arange(len(parts)), [len(part.x) for part in parts])
    return Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]), numbers)


def _check_alike(where: str, first: Samples, own: Samples) -> None:
    for what, one, other in (("samples", first.x, own.x), ("targets", first.y, own.y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise ConfigError(
                f"data: all clients have {what} of one shape and type, but those of client 0 are "
                f"{tuple(one.shape[1:])} {one.dtype} and those of {where} "
                f"{tuple(other.shape[1:])} {other.dtype}."
            )


def _check_test(where: str, train: Samples, test: Samples | None) -> None:
    if not len(train.x):
        raise ConfigError(f"data: {where} has no training samples; leave it out.")
    if test is None:
        return
    for what, one, other in (("samples", train.x, test.x), ("targets", train.y, test.y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise ConfigError(
                f"data: {where} has training {what} of shape {tuple(one.shape[1:])}, {one.dtype}, "
                f"but test {what} of shape {tuple(other.shape[1:])}, {other.dtype}; they must be "
                "alike."
            )
    if (train.clients is None) != (test.clients is None):
        raise ConfigError(
            f"data: {where} needs a column 'client' in both tables, or in neither of them."
        )


def _read_split(value: Any, where: str) -> tuple[Samples, Samples | None]:
    """Read training samples and test samples, if there are any."""
    if isinstance(value, Mapping):
        return _read_parts(value, where)
    if isinstance(value, tuple) and len(value) == _QUAD:
        x, y, x_test, y_test = value
        return _read_arrays(x, y, f"{where}, training part"), _read_arrays(
            x_test, y_test, f"{where}, test part"
        )
    if isinstance(value, tuple) and len(value) == _PAIR:
        train, test = value
        if _holds_pairs(train) and (test is None or _holds_pairs(test)):
            if test is None:
                return _read_samples(train, where), None
            return _read_samples(train, f"{where}, training part"), _read_samples(
                test, f"{where}, test part"
            )
    return _read_samples(value, where), None


def _read_parts(parts: Mapping[str, Any], where: str) -> tuple[Samples, Samples | None]:
    """Read a dictionary of parts, such as a DatasetDict."""
    if "train" not in parts:
        raise ConfigError(f"{where} needs a part 'train', but has {', '.join(map(str, parts))}.")
    test = next((parts[name] for name in TEST_NAMES if name in parts), None)
    return _read_split((parts["train"], test), where)


def _holds_pairs(value: Any) -> bool:
    return isinstance(value, tuple) or _is_data(value)


def _is_data(value: Any) -> bool:
    """Return whether a value holds samples with their targets, and is no array."""
    if isinstance(value, Tensor | np.ndarray | list | tuple | str):
        return False
    if isinstance(value, IterableDataset):
        return True
    table = hasattr(value, "columns") or hasattr(value, "column_names")
    items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return table or (items and not hasattr(value, "__array__"))


def _read_samples(value: Any, where: str) -> Samples:
    if isinstance(value, tuple) and len(value) == _PAIR:
        x, y = value
        return _read_arrays(x, y, where)
    if hasattr(value, "columns") and hasattr(value, "drop"):
        return _read_table(value, where)
    if hasattr(value, "column_names") and hasattr(value, "features"):
        return _read_columns(value, where)
    if isinstance(value, IterableDataset):
        raise ConfigError(
            f"data: {where} is an IterableDataset, of which clients cannot draw samples; collect "
            "them first: (x, y) tensors, or a map-style Dataset."
        )
    if isinstance(value, TensorDataset):
        if len(value.tensors) != _PAIR:
            raise ConfigError(f"data: {where} needs tensors x and y, not {len(value.tensors)}.")
        x, y = value.tensors
        return _read_arrays(x, y, where)
    if _is_data(value) and not isinstance(value, Mapping):
        return _read_items(value, where)
    raise ConfigError(f"data are {FORMS}; {where} is {describe(value)}.")


def _read_table(table: Any, where: str) -> Samples:
    """Read a DataFrame: targets, perhaps clients, and numbers in all other columns."""
    target = _choose_column(list(table.columns), TARGETS, where)
    client = next((name for name in CLIENTS if name in table.columns), None)
    rest = table.drop(columns=[target, *([client] if client else [])])
    if not len(rest.columns):
        raise ConfigError(f"data: {where} has no columns besides {target!r}; the rest is x.")
    try:
        x = rest.to_numpy(dtype="float32")
    except (TypeError, ValueError):
        texts = [
            str(name) for name in rest.columns if rest[name].to_numpy().dtype.kind not in "biuf"
        ]
        raise ConfigError(
            f"data: columns {', '.join(texts)} of {where} are no numbers; encode them first, for "
            "example with pandas.get_dummies."
        ) from None
    clients = None if client is None else _name_groups(table[client].to_numpy())
    return replace(_read_arrays(x, table[target].to_numpy(), where), clients=clients)


def _name_groups(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.dtype.kind in "iu" else values.astype(str)


def _choose_column(columns: Sequence[Any], known: Sequence[str], where: str) -> str:
    found = next((name for name in known if name in columns), None)
    if found is None:
        listed = ", ".join(map(str, columns))
        raise ConfigError(
            f"data: {where} needs a column {known[0]!r} (or {', '.join(map(repr, known[1:]))}), "
            f"but has {listed}; rename the one that is meant."
        )
    return found


def _read_columns(part: Any, where: str) -> Samples:
    """Read a Hugging Face Dataset: one column of samples, or several of numbers."""
    names = list(part.column_names)
    labels = [n for n in names if type(part.features[n]).__name__ == "ClassLabel"]
    target = labels[0] if labels else _choose_column(names, TARGETS, where)
    client = next((name for name in CLIENTS if name in names), None)
    inputs = [name for name in names if name not in (target, client)]
    if len(inputs) == 1:
        x = stack([to_array_channels_first(row) for row in part[inputs[0]][:]], where)
    elif inputs and all(getattr(part.features[n], "dtype", "") != "string" for n in inputs):
        x = np.stack([np.asarray(part[n][:]) for n in inputs], 1).astype(np.float32)
    else:
        raise ConfigError(
            f"data: {where} has the columns {', '.join(names)}; x is one column of arrays, images "
            "or token ids, or several of numbers. Keep those with select_columns, and turn text "
            "into token ids first."
        )
    clients = None if client is None else _name_groups(np.asarray(part[client][:]))
    return replace(_read_arrays(x, part[target][:], where), clients=clients)


def _read_items(data: Any, where: str) -> Samples:
    """Read a map-style Dataset: pairs (x, y)."""
    rows = [data[number] for number in range(len(data))]
    if not rows:
        raise ConfigError(f"data: {where} has no training samples; leave it out.")
    odd = next((row for row in rows if not isinstance(row, tuple | list) or len(row) != _PAIR), ())
    if odd != () or not rows:
        raise ConfigError(f"data: an item of {where} is a pair (x, y), but one is {describe(odd)}.")
    x, y = ([to_array_channels_first(row[i]) for row in rows] for i in (0, 1))
    return _read_arrays(stack(x, where), stack(y, where), where)


def _read_arrays(x: Any, y: Any, where: str) -> Samples:
    samples = Samples(read_inputs(x, where), read_targets(y, where))
    if len(samples.x) != len(samples.y):
        raise ConfigError(
            f"data: {where} needs one target per sample, but has {len(samples.x)} samples and "
            f"{len(samples.y)} targets; the order is (x, y) or (x, y, x_test, y_test)."
        )
    return samples
