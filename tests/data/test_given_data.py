"""Data as objects: every form gives the same tensors, and a sentence says what does not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.given_data import GivenData, read_data
from fednorm.data.sampling import Plan
from fednorm.errors import ConfigError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
SIZES = (4, 5, 6, 8, 10, 12, 15)  # of seven clients
PARTS = [
    (X[end - size : end], Y[end - size : end])
    for size, end in zip(SIZES, np.cumsum(SIZES), strict=True)
]


class Items(TorchDataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return torch.tensor(X[i]), int(Y[i])


class Frame:
    """What of a pandas DataFrame is used."""

    def __init__(self, **columns):
        self.held = {name: np.asarray(values) for name, values in columns.items()}
        self.columns = list(columns)

    def __getitem__(self, name):
        return Frame(**{name: self.held[name]})

    def drop(self, columns):
        return Frame(**{name: v for name, v in self.held.items() if name not in columns})

    def to_numpy(self, dtype=None):
        stacked = np.stack([self.held[name] for name in self.columns], 1)
        single = stacked[:, 0] if len(self.columns) == 1 and dtype is None else stacked
        return single if dtype is None else single.astype(dtype)


def make_frame(**more):
    return Frame(a=X[:, 0], b=X[:, 1], c=X[:, 2], d=X[:, 3], target=Y, **more)


FORMS = {
    "arrays": (X, Y),
    "lists": (X.tolist(), Y.tolist()),
    "tensors": (torch.tensor(X), torch.tensor(Y)),
    "tensor data set": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "data set": Items(),
    "table": make_frame(),
    "function": lambda: (X, Y),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tensors(form):
    data = read_data(FORMS[form])
    assert torch.equal(data.train.x, torch.tensor(X))
    assert torch.equal(data.train.y, torch.tensor(Y))
    assert data.test is None
    assert not data.divided


@pytest.mark.parametrize(
    "form",
    [
        (X, Y, X[:9], Y[:9]),
        ((X, Y), (X[:9], Y[:9])),
        (Items(), TensorDataset(torch.tensor(X[:9]), torch.tensor(Y[:9]))),
        {"train": (X, Y), "validation": (X[:9], Y[:9])},
    ],
)
def test_test_samples_are_those_given(form):
    data = read_data(form).load(0)
    assert torch.equal(data.x_test, torch.tensor(X[:9]))
    assert len(data.x) == 60


def test_without_test_samples_a_fifth_of_each_client_and_class_is_held_out():
    clients = [(X, Y), (X[:30], Y[:30])]
    data = read_data(clients).load(0)
    assert data.y_test[data.groups_test == 0].bincount().tolist() == [4, 4, 4]
    assert data.y_test[data.groups_test == 1].bincount().tolist() == [2, 2, 2]
    again, other = read_data(clients).load(0), read_data(clients).load(1)
    assert torch.equal(data.x_test, again.x_test)
    assert not torch.equal(data.x_test, other.x_test)


@pytest.mark.parametrize(
    "clients",
    [
        [(part, part) for part in PARTS],
        [TensorDataset(*map(torch.tensor, part)) for part in PARTS],
        make_frame(client=np.repeat([f"h{i}" for i in range(7)], SIZES)),
    ],
    ids=["pairs", "data sets", "table"],
)
def test_clients_keep_what_they_are_given(clients):
    given = read_data(clients)
    data = given.load(0)
    plan = Plan(4)
    federation = build_federation(data, "natural", plan, clients=7, seed=0)
    for number, (x, _) in enumerate(PARTS):
        own = data.x[federation.parts[number]]
        rows = {tuple(row) for row in x.tolist()}
        assert {tuple(row) for row in own.tolist()} <= rows
        assert len(own) + (0 if given.test else len(federation.test_parts[number])) == len(x)


def test_clients_of_a_table_are_in_the_order_of_their_numbers():
    data = read_data(make_frame(client=np.repeat(np.arange(12), 5))).load(0)
    parts = build_federation(data, "natural", Plan(4), clients=12, seed=0).parts
    assert data.groups[parts[2]].tolist() == [2] * len(parts[2])


def test_a_given_division_that_is_mixed_is_told(caplog):
    data = read_data([(part, part) for part in PARTS], "mixed").load(0)
    build_federation(data, "iid", Plan(4), clients=7, seed=0)
    assert "divided among 7 clients, but partition 'iid' mixes them" in caplog.text


TARGETS = {
    "class": (Y.astype("int32"), torch.int64, 3),
    "values": (X[:, 0].astype("float64"), torch.float64, 1),
    "labels": ((X[:, :3] > 0).astype(int), torch.float32, 3),
    "tokens": (RNG.integers(0, 9, (60, 5)), torch.int64, 9),
    "mask": (RNG.integers(-1, 4, (60, 5, 5)), torch.uint8, 4),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_are_known_by_type_and_shape(kind):
    y, dtype, outputs = TARGETS[kind]
    data = read_data((X, y)).load(0)
    assert (data.target, data.y.dtype, data.classes) == (kind, dtype, outputs)
    batch = next(data.to("cpu").test_batches())
    assert batch[1].dtype == (torch.float32 if dtype.is_floating_point else torch.int64)


@pytest.mark.parametrize("kind", ["labels", "tokens"])
def test_samples_with_several_targets_are_not_divided_by_class(kind):
    data = read_data((X, TARGETS[kind][0])).load(0)
    for rule in ("gamma=0", "dirichlet=1", "shards=0.5"):
        with pytest.raises(
            ValueError, match=r"'[a-z]+' divides samples by their class.*choose 'iid'"
        ):
            build_federation(data, rule, Plan(4), clients=3, seed=0)
    for rule in ("iid", "feature_shift"):
        assert build_federation(data, rule, Plan(4), clients=3, seed=0).clients == 3


def test_numbers_are_divided_by_their_size():
    data = read_data((X, X[:, 0])).load(0)
    parts = build_federation(data, "gamma=0", Plan(4), clients=4, seed=0).parts
    means = [float(data.y[part].mean()) for part in parts]
    assert means == sorted(means)
    assert np.bincount(data.labels()).min() >= 4


def test_token_ids_stay_integers_and_bytes_are_images():
    tokens = read_data((RNG.integers(0, 300, (60, 5)), Y)).load(0).to("cpu", torch.float64)
    assert next(tokens.test_batches())[0].dtype == torch.int64
    assert tokens.training_batch(np.arange(3))[0].dtype == torch.int64
    images = read_data((np.full((60, 1, 4, 4), 255, np.uint8), Y)).load(0).to("cpu")
    assert float(next(images.test_batches())[0].max()) == 1.0
    with pytest.raises(ValueError, match="names of tokens"):
        build_federation(tokens, "feature_shift", Plan(4), clients=3, seed=0)


BAD = {
    "one target per sample, but has 60 samples and 59": (X, Y[:-1]),
    r"the order is \(x, y\) or": (X[:40], X[40:], Y[:40], Y[40:]),
    "targets of arrays are no numbers, but such as 'cat'": (X, np.array(["cat", "dog"] * 30)),
    "NaN or infinite values in 2 of 60 rows, the first in row 3": (
        np.where(np.isin(np.arange(60), [3, 7])[:, None], np.nan, X),
        Y,
    ),
    "targets of arrays hold NaN": (X, np.where(Y, np.nan, 1.0)),
    "client 7 has no training samples": [*[(p, p) for p in PARTS], ((X[:0], Y[:0]), PARTS[0])],
    "all 60 training targets are class 0": (X, 0 * Y),
    r"data are \(x, y\).* of type ndarray, shape \(60, 4\)": X,
    "client 0 has no test samples and client 1 has": [(PARTS[0], None), (PARTS[1], PARTS[1])],
    r"client 0 are \(4,\) torch.float32 and those of client 1 \(2,\)": [
        PARTS[0],
        (X[:9, :2], Y[:9]),
    ],
    "pad or resize them": ([[1.0, 2.0], [3.0]], [0, 1]),
    "needs a column 'target'": Frame(a=X[:, 0], b=Y),
    "columns c of .* are no numbers": Frame(c=["red"] * 60, target=Y),
    "classes from 0 on, but one is -1": (X, Y - 1),
    "a list has one .train, test. pair per client, but entry 0": [X, Y],
    "the list of clients is empty": [],
    "IterableDataset": type("Stream", (IterableDataset,), {"__iter__": lambda _self: iter(())})(),
    "tuple, length 3": (X, Y, X),
    "needs a part 'train'": {"trian": (X, Y)},
    "masks of arrays have classes below 255": (X, np.full((60, 2, 2), 300)),
    "too few to hold some out": (X[:2], Y[:2]),
    "are of type complex64": (X.astype("complex64"), Y),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_said(message):
    with pytest.raises(ConfigError, match=message):
        read_data(BAD[message]).load(0)


def test_a_data_set_of_fednorm_is_taken_as_it_is():
    data = load_dataset("ring", 0)
    assert read_data(data) is data
    assert isinstance(read_data((X, Y)), GivenData)


def write_folders(root: Path):
    for number, (x, y) in enumerate(PARTS):
        folder = root / f"h{number}"
        folder.mkdir()
        if number == 0:
            np.savez(folder / "all.npz", x=x, y=y)
        elif number == 1:
            rows = [f"{','.join(map(str, row))},{label}" for row, label in zip(x, y, strict=True)]
            (folder / "all.csv").write_text("a,b,c,d,target\n" + "\n".join(rows) + "\n")
        else:
            np.save(folder / "x.npy", x)
            np.save(folder / "y.npy", y)


def test_one_folder_of_arrays_per_client(tmp_path):
    write_folders(tmp_path)
    data = load_dataset("folder", 0, root=str(tmp_path))
    names, counts = np.unique(np.r_[data.groups, data.groups_test], return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        f"h{number}": size for number, size in enumerate(SIZES)
    }
    assert data.classes == 3
    (tmp_path / "h6" / "y.npy").unlink()
    with pytest.raises(
        OSError, match=r"one .csv file in every client's folder, but .*h6 has x.npy"
    ):
        load_dataset("folder", 0, root=str(tmp_path))


def test_a_real_table():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=list("abcd")).assign(target=Y)
    assert torch.equal(read_data(frame).train.x, torch.tensor(X))
    clients = frame.assign(client=np.repeat(list("abcdefg"), SIZES))
    assert read_data(clients).load(0).given
    both = read_data((frame[list("abcd")], frame["target"]))
    assert torch.equal(both.train.y, torch.tensor(Y))
    with pytest.raises(ConfigError, match=r"columns c of .* are no numbers"):
        read_data(frame.assign(c="red"))


@pytest.mark.slow
def test_real_data_sets_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    tokens = RNG.integers(0, 50, (60, 5))
    part = datasets.Dataset.from_dict(
        {"input_ids": tokens.tolist(), "label": Y.tolist(), "client": (Y % 2).tolist()}
    )
    data = read_data(datasets.DatasetDict(train=part, test=part)).load(0)
    assert torch.equal(data.x, torch.tensor(tokens))
    assert data.groups_test.tolist() == (Y % 2).tolist()
    numbers = datasets.Dataset.from_dict({"a": X[:, 0], "b": X[:, 1], "y": X[:, 2]})
    assert read_data(numbers).train.x.shape == (60, 2)
    text = datasets.Dataset.from_dict({"text": ["a b"] * 60, "label": Y.tolist()})
    with pytest.raises(ConfigError, match="turn text into token ids"):
        read_data(text)
