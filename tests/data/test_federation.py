"""Clients and their batches: a function of seed, client, round and step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.data import load_dataset
from fednorm.data.federation import build_federation, interleave_batches
from fednorm.data.sampling import Plan, draw_participants
from fednorm.engines.merged_batch import MergedClients

KEY = {"seed": 3, "client": 2, "round_": 7}


def made(rule="gamma=0", plan=None, **fields):
    data = load_dataset("digits", 0)
    return build_federation(data, rule, plan or Plan(20), **{"clients": 10, "seed": 0, **fields})


@given(st.integers(1, 60), st.integers(1, 25), st.integers(1, 12))
def test_steps_are_full_batches_without_repetition(samples, batch, steps):
    drawn = list(Plan(batch, steps=steps).draw(samples, **KEY))
    assert len(drawn) == steps
    size = min(batch, samples)
    assert all(len(set(b.tolist())) == size for b in drawn)
    per_epoch = samples // size
    for start in range(0, steps - per_epoch + 1, per_epoch):
        epoch = np.concatenate(drawn[start : start + per_epoch])
        assert len(set(epoch.tolist())) == len(epoch)


@given(st.integers(1, 60), st.integers(1, 25), st.integers(1, 3))
def test_epochs_see_every_sample_once_and_no_batch_of_one(samples, batch, epochs):
    drawn = list(Plan(batch, steps=None, epochs=epochs).draw(samples, **KEY))
    counts = np.bincount(np.concatenate(drawn), minlength=samples)
    assert (counts == epochs).all()
    if batch > 1 and samples > 1:
        assert min(len(b) for b in drawn) > 1


def test_batches_depend_on_seed_client_and_round_only():
    plan = Plan(5, steps=3)
    first = [b.tolist() for b in plan.draw(50, **KEY)]
    assert first == [b.tolist() for b in plan.draw(50, **KEY)]
    for other in ({"seed": 4}, {"client": 1}, {"round_": 8}):
        assert first != [b.tolist() for b in plan.draw(50, **{**KEY, **other})]
    assert first == [b.tolist() for b in Plan(5, steps=9).draw(50, **KEY)][:3]


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**40 + 1])
def test_the_order_is_that_of_numpys_generator_for_the_key(seed):
    (drawn,) = Plan(30).draw(30, seed=seed, client=2, round_=7)
    assert drawn.tolist() == np.random.default_rng([seed, 2, 7, 0, 301]).permutation(30).tolist()


@pytest.mark.parametrize(
    "fields", [{"batch": 0}, {"batch": 1, "steps": 0}, {"batch": 1, "epochs": 2}]
)
def test_an_impossible_plan_is_refused(fields):
    with pytest.raises(ValueError, match=r"must be at least 1|either steps or epochs"):
        Plan(**fields)


def test_participants_are_drawn_for_each_round():
    drawn = [draw_participants(20, 0.25, seed=1, round_=r) for r in range(1, 30)]
    assert all(len(set(d)) == 5 and d == sorted(d) for d in drawn)
    assert len({tuple(d) for d in drawn}) > 20
    assert {c for d in drawn for c in d} == set(range(20))
    assert draw_participants(20, 1.0, seed=1, round_=1) == list(range(20))
    assert len(draw_participants(20, 0.001, seed=1, round_=1)) == 1
    with pytest.raises(ValueError, match="participation must be in"):
        draw_participants(20, 0.0, seed=1, round_=1)


def test_a_client_trains_and_is_tested_on_its_own_classes():
    clients = made()
    for client in range(10):
        ((_, y),) = clients.batches(client, 1).steps
        assert len(y) == 20
        own = set(clients.data.y[torch.from_numpy(clients.parts[client])].tolist())
        assert set(y.tolist()) <= own
        ((_, y),) = clients.test(client)
        assert set(y.tolist()) <= own
    assert sum(len(p) for p in clients.test_parts) == 400


def test_one_machine_merges_the_very_batches_of_the_clients():
    clients = made(plan=Plan(7, steps=None, epochs=1), rule="dirichlet_unbalanced=1", clients=4)
    merged = list(MergedClients(clients).batches(0, 3).steps)
    parts = [list(clients.batches(c, 3).steps) for c in range(4)]
    assert len(merged) == max(len(p) for p in parts)
    assert len({len(p) for p in parts}) > 1
    for step, (x, y) in enumerate(merged):
        present = [p[step] for p in parts if step < len(p)]
        assert torch.equal(x, torch.cat([b for b, _ in present]))
        assert torch.equal(y, torch.cat([b for _, b in present]))
    assert MergedClients(clients).batches(0, 3).examples == 1397


def test_shifted_features_reach_batches_and_test_splits():
    plain, shifted = made("iid"), made("feature_shift=shift")
    for client in (0, 9):
        amount = 0.5 * (2 * client / 10 - 1)
        ((x, _),) = plain.batches(client, 1).steps
        ((z, _),) = shifted.batches(client, 1).steps
        torch.testing.assert_close(z, x + amount)
        (((x, _),), ((z, _),)) = plain.test(client), shifted.test(client)
        torch.testing.assert_close(z, x + amount)
    assert torch.equal(shifted.data.x_test, plain.data.x_test)
    assert plain.data.x.data_ptr() != shifted.data.x.data_ptr()


def test_data_are_held_once():
    data = load_dataset("digits", 0)
    clients = build_federation(data, "gamma=0", Plan(20), clients=10, seed=0)
    assert clients.data.x.data_ptr() == data.x.data_ptr()
    assert clients.x_test.data_ptr() == data.x_test.data_ptr()


def test_natural_groups_are_tested_on_their_own():
    data = load_dataset("ring", 0)
    clients = build_federation(data, "natural", Plan(5), clients=10, seed=0)
    for client in range(10):
        ((_, y),) = clients.test(client)
        assert len(y.unique()) == 1


@pytest.mark.parametrize("flip", [False, True])
def test_interleaved_batches_are_those_of_the_clients(flip):
    clients = made(plan=Plan(6, steps=3))
    data = clients.data
    clients = replace(clients, data=replace(data, transform=replace(data.transform, flip=flip)))
    parts = [clients.batches(client, 5).steps for client in (4, 0, 7)]
    found = list(interleave_batches(parts))
    assert len(found) == 3
    for together, *apart in zip(found, *parts, strict=True):
        for i, own in enumerate(apart):
            assert torch.equal(together[0][i::3], own[0])
            assert torch.equal(together[1][i::3], own[1])


def test_batches_of_different_sizes_cannot_be_interleaved():
    long, short = (made(plan=Plan(size)).batches(0, 1).steps for size in (6, 5))
    with pytest.raises(ValueError, match="same shape"):
        next(interleave_batches([long, short]))
