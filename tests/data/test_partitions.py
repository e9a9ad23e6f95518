from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednorm.data.partition import PARTITIONS, create_partition, partition
from fednorm.data.partition.base import Partition, match_groups, match_test
from fednorm.data.partition.feature_shift import KINDS
from fednorm.data.partition.label_skew import (
    Dirichlet,
    draw_counts,
    draw_log_dirichlet,
    softmax,
)
from fednorm.errors import UnknownNameError
from generated import partition_problems

TEXTS = {
    "iid": "iid",
    "gamma": "gamma=0.3",
    "dirichlet": "dirichlet=0.3",
    "dirichlet_unbalanced": "dirichlet_unbalanced=2",
    "shards": "shards=0.75",
    "natural": "natural",
    "feature_shift": "feature_shift=noise",
}
EVEN = ["iid", "gamma", "dirichlet", "feature_shift"]


@pytest.mark.parametrize("name", EVEN)
@settings(max_examples=25, deadline=None)
@given(problem=partition_problems(), value=st.sampled_from([0.001, 0.1, 0.5, 1.0]))
def test_sizes_differ_by_at_most_one(name, problem, value):
    labels, _, clients, seed = problem
    argument = PARTITIONS[name].argument
    fields = {argument: value} if argument in ("gamma", "alpha") else {}
    sizes = [len(p) for p in partition(name, labels, clients=clients, seed=seed, **fields)]
    assert max(sizes) - min(sizes) <= 1


def test_partitions_do_not_change_unnoticed():
    labels = np.arange(12) % 3
    found = {
        text: [part.tolist() for part in partition(text, labels, clients=2, seed=0)]
        for text in ("iid", "gamma=0.5", "dirichlet=0.5", "shards=0.7")
    }
    assert found == {
        "iid": [[0, 1, 3, 7, 10, 11], [2, 4, 5, 6, 8, 9]],
        "gamma=0.5": [[3, 4, 6, 7, 9, 10], [0, 1, 2, 5, 8, 11]],
        "dirichlet=0.5": [[0, 3, 6, 7, 9, 10], [1, 2, 4, 5, 8, 11]],
        "shards=0.7": [[0, 3, 6, 7, 9, 10], [1, 2, 4, 5, 8, 11]],
    }


@settings(max_examples=25, deadline=None)
@given(problem=partition_problems())
def test_gamma_0_is_sorted_by_label_and_cut(problem):
    labels, _, clients, seed = problem
    parts = partition("gamma=0", labels, clients=clients, seed=seed)
    dealt = np.concatenate([np.sort(labels[part]) for part in parts])
    assert dealt.tolist() == sorted(labels.tolist())


def test_gamma_deals_its_share_at_random():
    labels = np.repeat(np.arange(10), 1000)
    parts = partition("gamma=0.4", labels, clients=10, seed=0)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    # 600 sorted and 40 random ones; what is left of a class is not exactly 600, so chunks spill
    # over into the neighbouring classes.
    np.testing.assert_allclose(np.diag(counts), 640, atol=70)
    apart = np.abs(np.subtract.outer(range(10), range(10))) > 1
    np.testing.assert_allclose(counts[apart], 40, atol=25)


def test_gamma_shuffles_within_a_label():
    parts = partition("gamma=0", np.zeros(100, dtype=int), clients=2, seed=0)
    assert parts[0].tolist() != list(range(50))


def slow_counts(size, mix, stock, rng):
    """Draw one sample at a time, leaving out the classes that have run out."""
    counts = np.zeros_like(stock)
    for _ in range(size):
        left = np.where(counts < stock, mix, 0.0)
        counts[rng.choice(len(stock), p=left / left.sum())] += 1
    return counts


@pytest.mark.slow
def test_dirichlet_draws_as_one_sample_at_a_time_would():
    mix, stock, tries = np.array([0.6, 0.3, 0.1]), np.array([3, 2, 9]), 3000
    rng = np.random.default_rng(0)
    slow = Counter(tuple(slow_counts(6, mix, stock, rng)) for _ in range(tries))
    fast = Counter(tuple(draw_counts(6, np.log(mix), stock, rng)) for _ in range(tries))
    assert len(slow) > 5
    for counts in slow | fast:
        assert abs(slow[counts] - fast[counts]) / tries < 0.04


def test_dirichlet_weights_have_the_moments_of_a_dirichlet():
    mixes = softmax(draw_log_dirichlet(0.5, (20000, 4), np.random.default_rng(0)))
    np.testing.assert_allclose(mixes.mean(0), 1 / 4, atol=0.01)
    variance = (1 / 4) * (3 / 4) / (4 * 0.5 + 1)
    np.testing.assert_allclose(mixes.var(0), variance, atol=0.005)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-9])
def test_dirichlet_with_a_tiny_alpha_gives_one_class_after_the_other(alpha):
    labels = np.arange(100) % 10
    parts = partition("dirichlet", labels, clients=10, seed=0, alpha=alpha)
    assert len(set(labels[parts[0]])) == 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))


def test_dirichlet_with_a_huge_alpha_is_nearly_iid():
    labels = np.repeat(np.arange(4), 1000)
    for name in ("dirichlet", "dirichlet_unbalanced"):
        for part in partition(name, labels, clients=4, seed=0, alpha=1e6):
            np.testing.assert_allclose(np.bincount(labels[part]), 250, atol=60)


def test_dirichlet_unbalanced_gives_every_client_the_minimum():
    labels = np.arange(200) % 4
    parts = partition("dirichlet_unbalanced=0.3", labels, clients=5, seed=0, min_samples=20)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 20
    assert max(sizes) - min(sizes) > 1


@pytest.mark.parametrize(("alpha", "least"), [(0.001, 10), (1.0, 26)])
def test_dirichlet_unbalanced_gives_up_clearly(alpha, least):
    with pytest.raises(ValueError, match="fewer clients, a larger alpha or a smaller min_samples"):
        partition(
            "dirichlet_unbalanced",
            np.arange(100) % 2,
            clients=4,
            seed=0,
            alpha=alpha,
            min_samples=least,
        )


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(1, 12),
    clients=st.integers(1, 12),
    fraction=st.floats(0.01, 1.0),
    seed=st.integers(0, 99),
)
def test_shards_give_each_client_its_share_of_the_classes(classes, clients, fraction, seed):
    labels = np.repeat(np.arange(classes), 30)
    held = max(1, round(fraction * classes))
    if clients * held < classes:
        with pytest.raises(ValueError, match="must give every class a client"):
            partition("shards", labels, clients=clients, seed=seed, fraction=fraction)
        return
    parts = partition("shards", labels, clients=clients, seed=seed, fraction=fraction)
    counts = np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    assert ((counts > 0).sum(axis=1) == held).all()
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_shards_say_which_fraction_and_client_count_would_do():
    labels = np.arange(100) % 10
    with pytest.raises(ValueError, match=r"fraction of 0.4 or more, or at least 10 clients"):
        partition("shards=0.1", labels, clients=3, seed=0)
    assert len(partition("shards=0.4", labels, clients=3, seed=0)) == 3
    assert len(partition("shards=0.1", labels, clients=10, seed=0)) == 10


def test_natural_gives_each_group_a_client():
    groups = np.array(["rome", "bern", "oslo", "bern"])
    parts = partition("natural", [0, 0, 1, 1], clients=3, seed=0, groups=groups)
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0]]


def test_natural_keeps_groups_whole_and_clients_even():
    groups = np.repeat([0, 1, 2, 3], [50, 10, 30, 30])
    parts = partition("natural", np.zeros(120, dtype=int), clients=2, seed=0, groups=groups)
    assert [np.unique(groups[part]).tolist() for part in parts] == [[0, 1], [2, 3]]


def test_natural_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="needs the group of every sample"):
        partition("natural", [0, 1], clients=2, seed=0)
    with pytest.raises(ValueError, match="got 3 clients for 2 groups; choose 2 clients or fewer"):
        partition("natural", [0, 1, 2], clients=3, seed=0, groups=["a", "b", "b"])
    with pytest.raises(ValueError, match="got 1 groups for 2 samples"):
        partition("natural", [0, 1], clients=1, seed=0, groups=["a"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gamma=0", {"gamma": 0.0}),
        (" gamma = 1e-2 ", {"gamma": 0.01}),
        ("dirichlet=0.1", {"alpha": 0.1}),
        ("dirichlet_unbalanced=0.5", {"alpha": 0.5, "min_samples": 1}),
        ("shards=0.2", {"fraction": 0.2}),
        ("feature_shift", {"kind": "shift", "strength": 1.0}),
        ("feature_shift=brightness", {"kind": "brightness", "strength": 1.0}),
        ("iid", {}),
        ("natural", {}),
    ],
)
def test_create_partition(text, expected):
    found = create_partition(text)
    assert type(found) is PARTITIONS[text.strip().partition("=")[0].strip()]
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma", "needs a number for gamma, but got none; write for example 'gamma=0.5'"),
        ("gamma=", "needs a number for gamma, but got ''"),
        ("dirichlet=many", "needs a number for alpha, but got 'many'"),
        ("gamma=0=1", "got '0=1'"),
        ("iid=3", "'iid' takes no value, but got 'iid=3'; write 'iid'"),
        ("feature_shift=", "unknown kind of feature shift ''"),
        ("feature_shift=bright", "did you mean 'brightness'"),
        ("gama=0", "unknown partition 'gama'; did you mean 'gamma'"),
        ("gamma=1.01", "from 0 .* to 1 .*, but got 1.01"),
        ("gamma=nan", "but got nan"),
        ("dirichlet=0", "finite alpha above 0, but got 0"),
        ("dirichlet=inf", "finite alpha above 0, but got inf"),
        ("dirichlet_unbalanced=-1", "finite alpha above 0, but got -1"),
        ("shards=0", "above 0 and at most 1, but got 0"),
        ("shards=1.5", "above 0 and at most 1, but got 1.5"),
        ("gama=0 + feature_shift=shift", "unknown partition 'gama'; did you mean 'gamma'"),
        ("feature_shift=noise + feature_shift=shift", "another partition, not by itself"),
        (
            "iid + dirichlet=1",
            "after '[+]' comes a partition that changes features, not 'dirichlet'",
        ),
    ],
)
def test_an_invalid_text_is_explained(text, message):
    with pytest.raises(ValueError, match=message):
        create_partition(text)


def test_fields_are_checked():
    assert partition("gamma", [0, 1], clients=2, seed=0, gamma=0)
    with pytest.raises(ValueError, match="got gamma twice"):
        create_partition("gamma=0", gamma=1)
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        create_partition("dirichlet=1", alfa=1)
    with pytest.raises(ValueError, match="min_samples of at least 1"):
        create_partition("dirichlet_unbalanced=1", min_samples=0)
    with pytest.raises(ValueError, match="finite strength of at least 0"):
        create_partition("feature_shift", strength=-1.0)


@pytest.mark.parametrize(
    ("labels", "clients", "message"),
    [
        ([0, 1], 0, "at least 1 client, but got 0"),
        ([0, 1], 3, "each of 3 clients a sample: there are 2"),
        ([], 1, "there are 0"),
        ([0.5, 1.0], 1, "one integer label per sample"),
        (np.eye(3, dtype=int), 1, "not one-hot rows"),
    ],
)
def test_requests_are_checked(labels, clients, message):
    with pytest.raises(ValueError, match=message):
        partition("iid", labels, clients=clients, seed=0)


def test_a_client_without_data_is_named():
    with pytest.raises(ValueError, match=r"client 1 has no data.*fewer clients, another seed"):
        partition("shards=1", [0, 1, 2], clients=2, seed=0)


def test_a_partition_that_loses_samples_is_caught(monkeypatch):
    class Lossy(Dirichlet):
        def split(self, labels, clients, rng, groups):
            del labels, rng, groups
            return [np.array([0])] * clients

    monkeypatch.setitem(PARTITIONS, "lossy", Lossy)
    with pytest.raises(ValueError, match="exactly once"):
        partition("lossy=1", [0, 1], clients=2, seed=0)


IMAGES = torch.rand(4, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "feature_shift"])
def test_only_feature_shift_changes_samples(name):
    assert create_partition(TEXTS[name]).transform(IMAGES, 1, 3, 0) is IMAGES


def test_labels_and_features_shift_together():
    labels = np.arange(60) % 3
    both = create_partition("dirichlet=0.1 + feature_shift=brightness")
    found, expected = (
        partition(rule, labels, clients=4, seed=1) for rule in (both, "dirichlet=0.1")
    )
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    torch.testing.assert_close(both.transform(IMAGES, 0, 4, 0), IMAGES / 2)


def seen(kind, client, *, x=IMAGES, clients=5, strength=1.0, seed=0):
    rule: Partition = create_partition(f"feature_shift={kind}", strength=strength)
    return rule.transform(x, client, clients, seed)


@pytest.mark.parametrize("client", range(5))
def test_shift_is_the_tutorials(client):
    tutorial = (client / 5) * 2 - 1
    torch.testing.assert_close(seen("shift", client), IMAGES + tutorial * 0.5)


def test_brightness_and_contrast_scale_by_powers_of_two():
    torch.testing.assert_close(seen("brightness", 0), IMAGES / 2)
    torch.testing.assert_close(seen("brightness", 3), IMAGES * 2**0.5)
    stretched = seen("contrast", 4)
    torch.testing.assert_close(stretched.mean((1, 2, 3)), IMAGES.mean((1, 2, 3)))
    torch.testing.assert_close(stretched.std((1, 2, 3)), 2 * IMAGES.std((1, 2, 3)))


@pytest.mark.parametrize("kind", ["brightness", "contrast", "rotation"])
def test_the_middle_client_and_an_only_client_see_samples_as_they_are(kind):
    torch.testing.assert_close(seen(kind, 2), IMAGES)
    torch.testing.assert_close(seen(kind, 0, clients=1), IMAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_strength_0_changes_nothing(kind):
    torch.testing.assert_close(seen(kind, 4, strength=0.0), IMAGES)


def test_rotation_by_90_degrees_is_exact():
    torch.testing.assert_close(seen("rotation", 4, strength=3.0), IMAGES.rot90(1, (2, 3)))
    torch.testing.assert_close(seen("rotation", 0, strength=3.0), IMAGES.rot90(-1, (2, 3)))


def test_rotation_keeps_distances_in_images_that_are_not_square():
    x = torch.zeros(1, 1, 5, 9, dtype=torch.float64)
    x[0, 0, 2, 4:7] = torch.tensor([1.0, 2.0, 3.0])  # a bar from the centre to the right
    turned = seen("rotation", 4, x=x, strength=3.0)
    assert turned[0, 0, :, 4].round(decimals=9).tolist() == [3, 2, 1, 0, 0]
    assert turned.sum().item() == pytest.approx(6)


def test_noise_belongs_to_the_client_and_the_seed():
    added = seen("noise", 4) - IMAGES
    assert added.std().item() == pytest.approx(0.5, rel=0.1)
    assert (seen("noise", 2) - IMAGES).std().item() == pytest.approx(0.25, rel=0.1)
    torch.testing.assert_close(seen("noise", 0), IMAGES)
    torch.testing.assert_close(seen("noise", 4), seen("noise", 4), atol=0, rtol=0)
    assert not torch.allclose(seen("noise", 4, seed=1), seen("noise", 4))
    assert not torch.allclose(added / 2, seen("noise", 2) - IMAGES)


def test_flat_samples_can_be_shifted_but_not_rotated():
    flat = torch.ones(2, 6)
    for kind in ("shift", "brightness", "contrast", "noise"):
        result = seen(kind, 1, x=flat)
        assert (result.shape, result.dtype) == (flat.shape, flat.dtype)
    with pytest.raises(ValueError, match=r"'rotation' needs images .* but got \(2, 6\)"):
        seen("rotation", 1, x=flat)


@settings(max_examples=40, deadline=None)
@given(problem=partition_problems(), tests=st.lists(st.integers(0, 40), max_size=60))
def test_test_samples_follow_the_training_mix(problem, tests):
    labels, _, clients, seed = problem
    test_labels = np.array(tests, dtype=np.int64)
    parts = partition("iid", labels, clients=clients, seed=seed)
    dealt = match_test(labels, parts, test_labels, np.random.default_rng(seed))
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(tests)))
    for label in set(tests) & set(labels.tolist()):
        held = np.array([(labels[part] == label).sum() for part in parts])
        given_out = np.array([(test_labels[part] == label).sum() for part in dealt])
        quota = given_out.sum() * held / held.sum()
        assert (np.abs(given_out - quota) < 1).all()


def test_test_samples_go_to_clients_that_train_on_the_class():
    labels, test_labels = np.repeat(np.arange(4), 25), np.arange(40) % 4
    parts = partition("gamma=0", labels, clients=4, seed=0)
    dealt = match_test(torch.tensor(labels), parts, test_labels, np.random.default_rng(0))
    assert [set(test_labels[part]) for part in dealt] == [{0}, {1}, {2}, {3}]
    unseen = match_test(labels, parts, np.full(8, 9), np.random.default_rng(0))
    assert [len(part) for part in unseen] == [2, 2, 2, 2]


def test_leftover_test_samples_go_to_the_largest_remainder():
    labels, parts = np.zeros(10, dtype=int), [np.arange(1), np.arange(1, 4), np.arange(4, 10)]
    for total, expected in ((3, [0, 1, 2]), (7, [1, 2, 4])):
        tests = np.zeros(total, dtype=int)
        dealt = match_test(labels, parts, tests, np.random.default_rng(0))
        assert [len(part) for part in dealt] == expected


def test_leftover_test_samples_do_not_all_go_to_the_first_clients():
    labels = np.repeat(np.arange(50), 4)
    parts = [np.arange(200)[i::4] for i in range(4)]
    dealt = match_test(labels, parts, np.arange(50), np.random.default_rng(0))
    assert min(len(part) for part in dealt) > 3


def test_groups_take_their_test_samples_along():
    groups = np.array(["a", "b", "c", "a"])
    parts = partition("natural", [0, 0, 0, 0], clients=2, seed=0, groups=groups)
    dealt = match_groups(groups, parts, np.array(["c", "a", "b", "a"]))
    assert [part.tolist() for part in dealt] == [[1, 3], [0, 2]]
    with pytest.raises(ValueError, match="test group d is in no client's training data"):
        match_groups(groups, parts, np.array(["d"]))
    with pytest.raises(ValueError, match="group a has 2"):
        match_groups(groups, [np.array([0, 1]), np.array([2, 3])], np.array(["a"]))
