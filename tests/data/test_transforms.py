"""Batch transforms against slow and obvious versions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.data import Dataset, load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.data.transforms import IGNORED, BatchTransform

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(count=6, height=5, width=7, seed=0):
    return torch.randint(
        0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(seed)
    ).byte()


def labels(count=6):
    return torch.arange(count)


def test_bytes_are_scaled_and_normalized():
    x = images()
    seen, y = BatchTransform(MEAN, STD, dtype=torch.float64).apply_evaluation(x, labels())
    for channel in range(3):
        expected = (x[:, channel].double() / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(seen[:, channel], expected)
    assert torch.equal(y, labels())


def test_floats_stay_as_they_are_by_default():
    x = torch.randn(4, 2)
    assert torch.equal(BatchTransform().apply_evaluation(x, labels(4))[0], x)


@given(pad=st.integers(0, 3), flip=st.booleans(), seed=st.integers(0, 5))
def test_every_training_image_is_a_shifted_perhaps_mirrored_one(pad, flip, seed):
    x = images()
    transform = BatchTransform(pad=pad, flip=flip, dtype=torch.float64)
    seen, _ = transform.apply_training(x, labels(), np.random.default_rng(seed))
    framed = torch.zeros(6, 3, 5 + 2 * pad, 7 + 2 * pad, dtype=torch.float64)
    framed[:, :, pad : pad + 5, pad : pad + 7] = x.double() / 255
    for image, frame in zip(seen, framed, strict=True):
        places = [
            frame[:, i : i + 5, j : j + 7] for i in range(2 * pad + 1) for j in range(2 * pad + 1)
        ]
        candidates = places + ([p.flip(-1) for p in places] if flip else [])
        assert any(torch.equal(image, candidate) for candidate in candidates)


def test_all_shifts_and_both_sides_occur():
    x = images(1).expand(400, -1, -1, -1)
    seen, _ = BatchTransform(pad=1, flip=True).apply_training(
        x, labels(400), np.random.default_rng(0)
    )
    assert len({tuple(image.flatten().tolist()) for image in seen}) == 9 * 2


def test_masks_move_with_their_images():
    """An image whose pixels are its mask stays so, wherever it is cut and mirrored."""
    mask = torch.randint(0, 200, (5, 8, 9), generator=torch.Generator().manual_seed(1)).byte()
    x = mask.unsqueeze(1).expand(-1, 3, -1, -1)
    transform = BatchTransform(window=(4, 6), flip=True, pad=1, dtype=torch.float64)
    seen, y = transform.apply_training(x, mask, np.random.default_rng(0))
    assert seen.shape == (5, 3, 4, 6)
    assert y.shape == (5, 4, 6)
    inside = y >= 0  # padding has no label
    assert torch.equal((seen[:, 0] * 255).round().long()[inside], y[inside])
    assert not seen[:, 0][~inside].any()


def test_pixels_without_a_label_do_not_count():
    y = torch.tensor([[[0, IGNORED], [1, 2]]], dtype=torch.uint8)
    _, seen = BatchTransform().apply_evaluation(torch.zeros(1, 3, 2, 2), y)
    assert seen.tolist() == [[[0, -100], [1, 2]]]


def test_a_window_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match=r"smaller than the window \(9, 9\)"):
        BatchTransform(window=(9, 9)).apply_training(images(), labels(), np.random.default_rng(0))


def test_batches_can_have_channels_last():
    x, _ = BatchTransform(channels_last=True).apply_evaluation(images(), labels())
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, BatchTransform().apply_evaluation(images(), labels())[0])


def data(transform):
    x, y = images(40), torch.arange(40) % 4
    return Dataset("mine", x, y, x, y, classes=4, transform=transform)


def test_batches_vary_with_round_and_step_but_not_from_run_to_run():
    clients = build_federation(
        data(BatchTransform(pad=2)), "iid", Plan(4, steps=2), clients=2, seed=0
    )
    first, again = (list(clients.batches(1, 1).steps) for _ in range(2))
    for (x, _), (z, _) in zip(first, again, strict=True):
        assert torch.equal(x, z)
    (later, _), *_ = clients.batches(1, 2).steps
    assert not torch.equal(first[0][0], later)


def test_feature_shift_keeps_the_scale_of_bytes():
    plain = build_federation(data(BatchTransform()), "iid", Plan(4), clients=2, seed=0)
    shifted = build_federation(
        data(BatchTransform()), "feature_shift=shift", Plan(4), clients=2, seed=0
    )
    ((x, _),), ((z, _),) = plain.batches(0, 1).steps, shifted.batches(0, 1).steps
    torch.testing.assert_close(z, x - 0.5)  # client 0 of 2: 0.5 (2·0/2 - 1)


def test_bytes_are_held_once_and_stay_bytes():
    mine = data(BatchTransform()).to("cpu", torch.float64)
    assert mine.x.dtype == torch.uint8
    assert mine.training_batch(np.arange(2), np.random.default_rng(0))[0].dtype == torch.float64
    clients = build_federation(mine, "gamma=0", Plan(4), clients=2, seed=0)
    assert clients.data.x.data_ptr() == mine.x.data_ptr()


def test_test_batches_are_all_samples_in_order():
    mine = load_dataset("digits", 0)
    joined = torch.cat([x for x, _ in mine.test_batches()])
    assert torch.equal(joined, mine.x_test)
    some = np.array([5, 3, 9])
    ((x, y),) = mine.test_batches(some)
    assert torch.equal(x, mine.x_test[some])
    assert torch.equal(y, mine.y_test[some])


def test_scenes_are_street_like_and_seeded():
    one, two, other = (load_dataset("scenes", seed) for seed in (0, 0, 1))
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)
    assert one.segmentation
    assert one.metric == "mean IoU"
    assert (one.y[:, 0] == IGNORED).all()
    assert set(one.y[one.y != IGNORED].tolist()) == set(range(5))
    assert sorted(set(one.groups)) == list(range(6))
    sparse = one.y.numpy()[:, ::8, ::8]
    assert one.labels().tolist() == [np.bincount(m[m != IGNORED]).argmax() for m in sparse]
    with pytest.raises(ValueError, match="'scenes' needs classes of at least 3, but got 2"):
        load_dataset("scenes", 0, classes=2)
