"""What every partition promises; a new one is tested by being registered."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.contract import CHECKS
from fednorm.contract.components import check_single_use
from fednorm.data.partition import PARTITIONS, partition
from generated import partition_problems

VALUE = 0.75  # of a partition that needs one
TEXTS = {"dirichlet_unbalanced": "dirichlet_unbalanced=2"}  # which gives up on few samples
UNSEEDED = {"natural"}
every = pytest.mark.parametrize("name", sorted(PARTITIONS))


def text_of(name):
    cls = PARTITIONS[name]
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    assert needed in ([], [cls.argument])
    return TEXTS.get(name, f"{name}={VALUE}" if needed else name)


def split(name, labels, clients, seed=0, groups=None):
    groups = np.arange(len(labels)) if groups is None else groups
    return partition(text_of(name), labels, clients=clients, seed=seed, groups=groups)


@every
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = PARTITIONS[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.__doc__.partition("\n")[0].endswith("."), cls.__doc__
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert cls.argument is None or cls.argument in fields
    for field in fields.values():
        assert field.metadata.get("help"), field.name


def test_all_are_listed_by_the_command():
    result = CliRunner().invoke(app, ["list", "partitions"])
    assert result.exit_code == 0
    listed = {
        re.match(r"\w+", line.split()[0]).group() for line in result.output.splitlines() if line
    }
    assert PARTITIONS.keys() <= listed


@every
@settings(max_examples=25, deadline=None)
@given(problem=partition_problems())
def test_every_sample_has_exactly_one_client(name, problem):
    labels, groups, clients, seed = problem
    check_single_use(text_of(name), labels, groups, clients, seed)


@every
def test_keeps_the_contract(name):
    """`fednorm check` calls the same checks."""
    for check in CHECKS["partition"]:
        check(text_of(name))


@every
def test_the_seed_alone_decides_the_partition(name):
    labels = np.arange(300) % 10
    groups = np.array([f"writer {i % 7}" for i in range(300)])

    def run(seed):
        np.random.seed(seed + 1)  # noqa: NPY002 (the global generator must not matter)
        return [part.tolist() for part in split(name, labels, 5, seed, groups)]

    assert run(3) == run(3)
    assert (run(3) != run(4)) is (name not in UNSEEDED)


@every
def test_tensors_lists_and_arrays_are_the_same_labels(name):
    labels = np.arange(60) % 3
    results = [
        split(name, given_labels, 3, groups=labels.tolist())
        for given_labels in (labels, labels.tolist(), torch.tensor(labels), labels.astype(np.uint8))
    ]
    for result in results:
        assert all(map(np.array_equal, result, results[0]))


@every
def test_each_sample_may_have_its_client(name):
    parts = split(name, np.zeros(6, dtype=int), 6)
    assert sorted(part.tolist() for part in parts) == [[i] for i in range(6)]


@every
@pytest.mark.parametrize("clients", [7, 100])
def test_more_clients_than_samples_are_refused_with_a_way_out(name, clients):
    with pytest.raises(ValueError, match=f"{clients} clients .*are 6; choose fewer clients") as e:
        split(name, np.zeros(6, dtype=int), clients)
    assert repr(text_of(name)) in str(e.value)


@every
@pytest.mark.parametrize("clients", [0, -1])
def test_no_clients_are_refused(name, clients):
    with pytest.raises(ValueError, match=f"'{name}.*at least 1 client, but got {clients}"):
        split(name, np.zeros(6, dtype=int), clients)
