"""Attacks against slow, obvious versions; the choice of Byzantine clients and their knowledge."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fednorm import ClientState, Reply, broadcast, client_round
from fednorm.algorithms import create_algorithm
from fednorm.attacks import ATTACKS, DataAttack, create_attack
from fednorm.attacks.adversary import Adversary, apply_attack, choose_byzantine
from fednorm.attacks.base import DataInfo
from fednorm.attacks.omniscient import choose_z
from support import ToyClients, task_of

BYZANTINE = frozenset({1, 4})
ON_MESSAGES = sorted(name for name, cls in ATTACKS.items() if not cls.on_data)


@pytest.fixture(scope="module")
def replies():
    task = task_of(
        "fbn", create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global")
    )
    clients = ToyClients(sizes=(5, 4, 6, 5, 3))
    received = broadcast(task, task.initial_state)
    return [client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(5)]


def corrupted(replies, name, target="both", **fields):
    adversary = Adversary(create_attack(name, **fields), BYZANTINE, target, seed=3)
    return apply_attack(replies, adversary, round_=1)


def honest_of(replies, name):
    return np.stack([r.update[name].numpy() for r in replies if r.client not in BYZANTINE])


def honest_moments(replies, path, what):
    reports = [r.stats[path].moments for r in replies if r.client not in BYZANTINE]
    return np.stack([getattr(m, what).numpy() for m in reports])


def slow_z(n, f):
    s = int(np.floor(n / 2 + 1)) - f
    return NormalDist().inv_cdf((n - f - s) / (n - f))


def slow_alie(_own, honest):
    return honest.mean(0) - slow_z(5, 2) * honest.std(0)


ORACLES = {  # settings, what becomes of a value, and what of a variance
    "sign_flip": ({}, lambda own, _: -own, lambda own, _: own),
    "foe": ({"epsilon": 0.7}, lambda _, honest: -0.7 * honest.mean(0), lambda own, _: 0 * own),
    "alie": ({}, slow_alie, lambda own, honest: np.maximum(slow_alie(own, honest), 0)),
    "mimic": ({"victim": 1}, lambda _, honest: honest[1], lambda _, honest: honest[1]),
    "non_finite": ({"value": "inf"}, *2 * [lambda own, _: np.full_like(own, np.inf)]),
    "replacement": ({}, lambda own, _: own * 5 / 2, lambda own, _: own * 25 / 4),
}


@pytest.mark.parametrize("name", ORACLES)
def test_formulas(replies, name):
    fields, value, variance = ORACLES[name]
    found = corrupted(replies, name, **fields)
    for client in BYZANTINE:
        for key, own in replies[client].update.items():
            expected = value(own.numpy(), honest_of(replies, key))
            np.testing.assert_allclose(found[client].update[key].numpy(), expected, rtol=1e-12)
        for path, report in replies[client].stats.items():
            changed = found[client].stats[path]
            for what, formula in (("mean", value), ("var", variance)):
                own = getattr(report.moments, what).numpy()
                expected = formula(own, honest_moments(replies, path, what))
                sent = getattr(changed.moments, what).numpy()
                np.testing.assert_allclose(sent, expected, rtol=1e-12, atol=1e-15)
            assert (changed.num_batches, changed.moments.count) == (
                report.num_batches,
                report.moments.count,
            )


def test_gaussian_noise_has_its_std_and_depends_on_seed_client_and_round(replies):
    found = corrupted(replies, "gaussian", std=3.0)
    values = torch.cat([t.flatten() for t in found[1].update.values()])
    assert float(values.std()) == pytest.approx(3.0, rel=0.1)
    assert abs(float(values.mean())) < 0.3
    for report in found[1].stats.values():
        assert float(report.moments.var.min()) >= 0
    again = corrupted(replies, "gaussian", std=3.0)
    name = next(iter(found[1].update))
    assert torch.equal(found[1].update[name], again[1].update[name])
    assert not torch.equal(found[1].update[name], found[4].update[name])


@pytest.mark.parametrize("name", ON_MESSAGES)
@pytest.mark.parametrize("target", ["updates", "statistics", "both"])
def test_only_the_target_of_byzantine_clients_changes(replies, name, target):
    found = corrupted(replies, name, target)
    for before, after in zip(replies, found, strict=True):
        if before.client not in BYZANTINE:
            assert after is before
            continue
        assert (after.update is before.update) == (target == "statistics")
        assert (after.momentum is before.momentum) == (target == "statistics")
        assert (after.stats is before.stats) == (target == "updates")
        assert after.examples == before.examples
        assert after.update.keys() == before.update.keys()
        assert after.momentum.keys() == before.momentum.keys()


@pytest.mark.parametrize("name", ON_MESSAGES)
def test_attacks_see_honest_replies_only(replies, name):
    """Replies of other Byzantine clients have no influence; without honest ones nothing is seen."""
    shaken = [
        replace(r, update={k: v + 100 for k, v in r.update.items()}) if r.client == 4 else r
        for r in replies
    ]
    one, other = corrupted(replies, name)[1], corrupted(shaken, name)[1]
    for key in one.update:
        assert torch.equal(one.update[key].nan_to_num(), other.update[key].nan_to_num())
    alone = corrupted([replies[1], replies[4]], name)
    if ATTACKS[name].omniscient:
        assert alone == [replies[1], replies[4]]
    else:
        assert alone[0] is not replies[1]


def test_replies_to_a_calibration_are_statistics(replies):
    told = [Reply(r.client, r.examples, {}, {}, r.stats) for r in replies]
    adversary = Adversary(create_attack("sign_flip"), BYZANTINE, "statistics", seed=3)
    found = apply_attack(told, adversary, 1, calibration=True)
    path = next(iter(replies[1].stats))
    mean = replies[1].stats[path].moments.mean
    assert torch.equal(found[1].stats[path].moments.mean, -mean)
    untouched = apply_attack(told, replace(adversary, target="updates"), 1, calibration=True)
    assert untouched == told


def test_the_byzantine_set_is_fixed_by_the_seed():
    chosen = [choose_byzantine(range(10), 3, seed) for seed in range(20)]
    assert chosen == [choose_byzantine(list(range(10)), 3, seed) for seed in range(20)]
    assert all(len(some) == 3 and some <= set(range(10)) for some in chosen)
    assert len(set(chosen)) > 10


@pytest.mark.parametrize(("n", "f"), [(10, 3), (10, 4), (20, 3), (50, 24), (9, 2)])
def test_z_of_alie(n, f):
    assert choose_z(n, f) == pytest.approx(slow_z(n, f))


@pytest.mark.parametrize(("n", "f"), [(2, 1), (3, 1), (1, 0), (4, 3)])
def test_z_is_finite_where_the_formula_is_not(n, f):
    assert np.isfinite(choose_z(n, f))


def test_flipped_labels():
    x, y = torch.zeros(4, 1, 8, 8), torch.tensor([0, 9, 4, -100])
    data_info = DataInfo(10, torch.ones(1, 8, 8))
    same, flipped = create_attack("label_flip").poison(x, y, data_info, torch.Generator())
    assert same is x
    assert flipped.tolist() == [9, 0, 5, -100]


def test_a_backdoor_marks_a_share_of_images_and_tests_on_all_others():
    x, y = torch.rand(2000, 2, 8, 8), torch.arange(2000) % 10
    data_info = DataInfo(10, torch.full((2, 8, 8), 7.0))
    chosen = create_attack("backdoor", target=3, size=2, share=0.25)
    seen, taught = chosen.poison(x, y, data_info, torch.Generator().manual_seed(0))
    marked = (seen[..., -2:, -2:] == 7).flatten(1).all(1)
    assert 0.2 < float(marked.float().mean()) < 0.3
    assert bool((taught[marked] == 3).all())
    assert torch.equal(taught[~marked], y[~marked])
    assert torch.equal(seen[~marked], x[~marked])
    assert torch.equal(seen[..., :-2, :], x[..., :-2, :])
    ((tested, wanted),) = chosen.add_trigger([(x, y)], data_info)
    assert len(tested) == 1800
    assert bool((wanted == 3).all())
    assert bool((tested[..., -2:, -2:] == 7).all())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("foe", {"epsilon": 0.0}),
        ("alie", {"z": float("inf")}),
        ("mimic", {"victim": -1}),
        ("gaussian", {"std": -1.0}),
        ("non_finite", {"value": "zero"}),
        ("replacement", {"scale": float("nan")}),
        ("backdoor", {"share": 0.0}),
        ("backdoor", {"size": 0}),
    ],
)
def test_impossible_settings_are_refused(name, fields):
    with pytest.raises(ValueError, match=f"{name} needs"):
        create_attack(name, **fields)


def test_attacks_on_data_leave_messages_alone(replies):
    for name, cls in ATTACKS.items():
        if issubclass(cls, DataAttack):
            assert corrupted(replies, name) == list(replies)
