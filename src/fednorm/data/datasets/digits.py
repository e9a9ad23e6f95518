"""Handwritten digits of 8x8 pixels: 1797 samples, included in the library.

Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998; UCI Machine Learning
Repository, CC BY 4.0), its test part, as distributed with scikit-learn. `digits.npz` holds the
pixels (0 to 16) and labels as unsigned bytes, in scikit-learn's order.
"""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.dataset import Dataset
from fednorm.registry import param

SAMPLES = 1797
DARKEST = 16


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8x8 pixels: real, small, needs no download."""

    test: int = param(400, "number of test samples, which the seed chooses")

    def __post_init__(self) -> None:
        """Check that both splits get samples."""
        if not 1 <= self.test < SAMPLES:
            raise ValueError(
                f"data set 'digits' needs test between 1 and {SAMPLES - 1}, because both splits "
                f"share {SAMPLES} samples, but got {self.test}."
            )

    def load(self, seed: int) -> Dataset:
        """Load the digits, split by the seed.

        >>> digits = Digits(test=300).load(seed=0)
        >>> digits.shape, len(digits.y), len(digits.y_test)
        ((1, 8, 8), 1497, 300)
        """
        with (
            (files("fednorm.data.datasets") / "digits.npz").open("rb") as file,
            np.load(file) as stored,
        ):
            images, labels = stored["images"], stored["labels"]
        x = torch.from_numpy(images).float().div(DARKEST).unsqueeze(1)
        y = torch.from_numpy(labels).long()
        order = make_rng(seed, Stream.DIGITS_SPLIT).permutation(SAMPLES)
        held_out, kept = np.sort(order[: self.test]), np.sort(order[self.test :])
        return Dataset("digits", x[kept], y[kept], x[held_out], y[held_out], classes=10)
