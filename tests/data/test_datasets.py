import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednorm.data import Dataset, load_dataset
from fednorm.errors import UnknownNameError


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn():
    data = load_dataset("digits", 9, test=300)
    expected = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.cat([data.x, data.x_test]).squeeze(1).double().numpy() * 16
    labels = torch.cat([data.y, data.y_test]).numpy()
    ours = np.column_stack([images.reshape(len(images), -1), labels])
    theirs = np.column_stack([expected.data, expected.target])
    # Each sample once, in one split: the rows agree as multisets.
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])
    assert (len(data.x), len(data.x_test)) == (1497, 300)
    assert data.shape == (1, 8, 8)


@pytest.mark.slow
def test_digits_keep_the_order_of_scikit_learn_within_a_split():
    data = load_dataset("digits", 0, test=1)
    expected = pytest.importorskip("sklearn.datasets").load_digits().target.tolist()
    missing = next(i for i in range(1797) if data.y.tolist() == expected[:i] + expected[i + 1 :])
    assert data.y_test.tolist() == [expected[missing]]


@pytest.mark.parametrize("test", [0, 1797, -1])
def test_digits_refuse_an_empty_split(test):
    with pytest.raises(ValueError, match=f"between 1 and 1796.*got {test}"):
        load_dataset("digits", 0, test=test)


def test_ring_has_its_clouds_where_the_paper_puts_them():
    data = load_dataset("ring", 0, samples_per_class=4000)
    for label in range(10):
        angle = 2 * math.pi * label / 10
        cloud = data.x[data.y == label].double()
        centre = torch.tensor([10 * math.cos(angle), 10 * math.sin(angle)], dtype=torch.float64)
        torch.testing.assert_close(cloud.mean(0), centre, atol=0.1, rtol=0)
        torch.testing.assert_close(cloud.var(0), torch.ones(2).double(), atol=0.1, rtol=0)


def test_ring_defaults_are_those_of_figure_1():
    data = load_dataset("ring", 0)
    assert data.y.bincount().tolist() == data.y_test.bincount().tolist() == [30] * 10
    assert data.groups.tolist() == data.y.tolist()
    assert data.groups_test.tolist() == data.y_test.tolist()


@pytest.mark.parametrize(
    "fields", [{"classes": 0}, {"samples_per_class": 0}, {"radius": -1.0}, {"std": math.nan}]
)
def test_ring_refuses_invalid_fields(fields):
    with pytest.raises(ValueError, match=f"finite {next(iter(fields))} of at least"):
        load_dataset("ring", 0, **fields)


def test_patterns_are_noise_plus_two_on_the_block_of_the_class():
    data = load_dataset("patterns", 0, samples=2000, size=12)
    for label in range(10):
        expected = torch.zeros(12, 12)
        expected[label % 12 :, (3 * label) % 12 :][:3, :3] = 2.0
        images = data.x[data.y == label, 0]
        torch.testing.assert_close(images.mean(0), expected, atol=0.4, rtol=0)
        torch.testing.assert_close((images - expected).std(), torch.tensor(1.0), atol=0.03, rtol=0)


def test_patterns_of_one_channel_do_not_change():
    data = load_dataset("patterns", 5, samples=9, test=4, size=6, classes=4)
    generator = torch.Generator().manual_seed(5)
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        noise = torch.randn(len(y), 1, 6, 6, generator=generator)
        assert torch.equal(y, torch.randint(4, (len(y),), generator=generator))
        for image, label, plain in zip(x, y.tolist(), noise, strict=True):
            plain[0, label : label + 3, 3 * label % 6 :][:, :3] += 2.0
            assert torch.equal(image, plain)


def test_patterns_of_three_channels_have_the_block_in_each():
    data = load_dataset("patterns", 0, samples=3000, size=8, classes=2, channels=3)
    assert data.shape == (3, 8, 8)
    means = data.x[data.y == 1].mean(0)
    expected = torch.zeros(3, 8, 8)
    expected[:, 1:4, 3:6] = 2.0
    torch.testing.assert_close(means, expected, atol=0.15, rtol=0)
    noise = data.x[:, :, 7, 7]  # outside the blocks, each channel has its own
    assert (noise.T.corrcoef() - torch.eye(3)).abs().max() < 0.1
    with pytest.raises(ValueError, match="channels of at least 1, but got 0"):
        load_dataset("patterns", 0, channels=0)


def test_patterns_refuse_classes_that_look_alike():
    with pytest.raises(ValueError, match="classes=9 and size=8"):
        load_dataset("patterns", 0, size=8, classes=9)
    with pytest.raises(ValueError, match="samples of at least 1, but got 0"):
        load_dataset("patterns", 0, samples=0)


def test_unknown_names_and_fields_are_explained():
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        load_dataset("digit", 0)
    with pytest.raises(UnknownNameError, match=r"field of data set 'ring' 'radios'.*'radius'"):
        load_dataset("ring", 0, radios=3)


def test_to_converts_samples_and_keeps_labels():
    data = load_dataset("ring", 0)
    double = data.to("cpu", torch.float64)
    assert double.x.dtype == double.x_test.dtype == torch.float64
    assert double.y.dtype == torch.int64
    assert double.groups is data.groups
    assert torch.equal(double.x, data.x.double())
    assert data.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, dtype=torch.int64)}, "labels per training sample, but has 2 for 3"),
        ({"y_test": torch.tensor([2])}, "2 classes, but a test label is 2"),
        ({"y": torch.tensor([0, -1, 0])}, "from 0 on"),
        ({"y": torch.zeros(3)}, "int64 labels"),
        ({"x_test": torch.zeros(1, 5)}, r"one shape, but has \(4,\) and \(5,\)"),
        ({"groups": np.arange(2)}, "groups per training sample, but has 2 for 3"),
    ],
)
def test_a_data_set_whose_parts_disagree_is_refused(change, message):
    y = torch.zeros(3, dtype=torch.int64)
    data = Dataset("mine", torch.zeros(3, 4), y, torch.zeros(1, 4), y[:1], classes=2)
    with pytest.raises(ValueError, match=message):
        replace(data, **change)
