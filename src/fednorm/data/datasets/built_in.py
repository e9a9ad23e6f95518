"""Data sets that are not loaded from elsewhere: synthetic ones, and digits, which are embedded."""

import math
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data.dataset import Dataset, check_least
from fednorm.data.transforms import IGNORED, BatchTransform
from fednorm.registry import param

BLOCK, BRIGHTNESS = 3, 2.0  # of a pattern
BORDER = 2  # pixels of a scene


@dataclass(frozen=True, slots=True)
class Ring:
    """Points in the plane around a circle, one class per cloud; the natural group is the class.

    The setting of FBN's Figure 1: Guerraoui, Pinot, Rizk, Stephan and Taiani, "Overcoming the
    Challenges of Batch Normalization in Federated Learning" (2024), arXiv:2405.14670, section 3.
    Class i is normal around `10 (cos a, sin a)` with variance 1, and has 30 points. The paper
    prints the angle as `(2 pi i - 1) / 10`; here it is `2 pi i / classes`: the same ring, turned by
    0.1 radian.
    """

    classes: int = param(10, "number of clouds on the circle")
    samples_per_class: int = param(30, "points per cloud, for training and again for testing")
    radius: float = param(10.0, "radius of the circle")
    std: float = param(1.0, "standard deviation of each coordinate within a cloud")

    def __post_init__(self) -> None:
        for field, least in (("classes", 1), ("samples_per_class", 1), ("radius", 0), ("std", 0)):
            value = getattr(self, field)
            if not least <= value < math.inf:
                raise ValueError(
                    f"data set 'ring' needs a finite {field} of at least {least}, but got {value}."
                )

    def load(self, seed: int) -> Dataset:
        """Draw the points with the seed.

        >>> ring = Ring().load(seed=0)
        >>> ring.shape, len(ring.y), ring.classes
        ((2,), 300, 10)
        """
        rng = make_rng(seed, Stream.RING_POINTS)
        y = np.repeat(np.arange(self.classes), self.samples_per_class)
        x, x_test = self.draw_points(y, rng), self.draw_points(y, rng)
        labels = torch.tensor(y)
        return Dataset("ring", x, labels, x_test, labels, self.classes, groups=y, groups_test=y)

    def draw_points(self, y: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Draw one point per label."""
        angle = 2 * np.pi * y / self.classes
        center = self.radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        points = center + self.std * rng.standard_normal(center.shape)
        return torch.from_numpy(points).float()


@dataclass(frozen=True, slots=True)
class Patterns:
    """Standard normal noise images, plus 2 on a 3x3 block whose position is the class.

    The images of Unbitrium's tutorial 091 ("FL Batch Normalization", class BNDataset). There,
    `np.random.seed` does not seed the data, which torch draws; here everything comes from one
    generator made from the seed, and no global generator is used.
    """

    samples: int = param(1000, "number of training images")
    test: int = param(500, "number of test images")
    size: int = param(28, "height and width of an image")
    classes: int = param(10, "number of classes, at most `size`: beyond that positions repeat")
    channels: int = param(1, "number of channels; each has its noise, all have the block")

    def __post_init__(self) -> None:
        """Check the counts, and that no two classes share a position."""
        check_least("patterns", self, samples=1, test=1, size=1, classes=1, channels=1)
        if self.classes > self.size:
            raise ValueError(
                f"data set 'patterns' needs classes <= size, because positions repeat after size "
                f"classes, but got classes={self.classes} and size={self.size}; use larger images."
            )

    def load(self, seed: int) -> Dataset:
        """Draw the images with the seed.

        >>> patterns = Patterns(samples=20, test=10).load(seed=0)
        >>> patterns.shape, len(patterns.y), len(patterns.y_test)
        ((1, 28, 28), 20, 10)
        """
        generator = Generator().manual_seed(seed)
        x, y = self._draw_images(self.samples, generator)
        x_test, y_test = self._draw_images(self.test, generator)
        return Dataset("patterns", x, y, x_test, y_test, self.classes)

    def _draw_images(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw noise and labels, then add each label's block."""
        x = torch.randn(count, self.channels, self.size, self.size, generator=generator)
        y = torch.randint(self.classes, (count,), generator=generator)
        for label in range(self.classes):
            row, column = label % self.size, (3 * label) % self.size
            x[y == label, :, row : row + BLOCK, column : column + BLOCK] += BRIGHTNESS
        return x, y


@dataclass(frozen=True, slots=True)
class Scenes:
    """Synthetic scenes to segment; the natural group of a scene is its city.

    Segmentation without a download: sky above, road below, and rectangles of further classes
    between them, each class in its colour with noise. Every city has its brightness. A border of
    two pixels has no label, like the car that carries the camera in Cityscapes.
    """

    samples: int = param(120, "number of training scenes")
    test: int = param(40, "number of test scenes")
    height: int = param(48, "pixels from top to bottom")
    width: int = param(64, "pixels from left to right")
    classes: int = param(5, "number of classes: sky, road, and rectangles between them")
    cities: int = param(6, "number of cities")

    def __post_init__(self) -> None:
        check_least("scenes", self, samples=1, test=1, height=16, width=16, classes=3, cities=1)

    def load(self, seed: int) -> Dataset:
        """Draw the scenes with the seed.

        >>> scenes = Scenes(samples=4, test=2).load(seed=0)
        >>> scenes.shape, tuple(scenes.y.shape), scenes.metric
        ((3, 48, 64), (4, 48, 64), 'mean IoU')
        """
        rng = make_rng(seed, Stream.SCENES)
        colors = rng.integers(40, 200, (self.classes, 3))
        x, y, cities = self._draw_scenes(self.samples, colors, rng)
        x_test, y_test, cities_test = self._draw_scenes(self.test, colors, rng)
        return Dataset(
            "scenes",
            torch.from_numpy(x),
            torch.from_numpy(y),
            torch.from_numpy(x_test),
            torch.from_numpy(y_test),
            self.classes,
            groups=cities,
            groups_test=cities_test,
            transform=BatchTransform(mean=(0.5,) * 3, std=(0.25,) * 3),
        )

    def _draw_scenes(
        self, count: int, colors: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        masks = np.stack([self._draw_mask(rng) for _ in range(count)])
        cities = np.arange(count) % self.cities
        light = 20 * (cities - (self.cities - 1) / 2)
        pixels = colors[masks].transpose(0, 3, 1, 2) + light[:, None, None, None]
        pixels = pixels + 15 * rng.standard_normal(pixels.shape)
        labels = np.full_like(masks, IGNORED)
        inner = (slice(None), slice(BORDER, -BORDER), slice(BORDER, -BORDER))
        labels[inner] = masks[inner]
        return pixels.clip(0, 255).astype(np.uint8), labels, cities

    def _draw_mask(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        mask = np.zeros((self.height, self.width), np.uint8)
        horizon = self.height // 2 + int(rng.integers(-4, 5))
        mask[horizon:] = 1
        for _ in range(4):
            kind = int(rng.integers(2, self.classes))
            top, left = int(rng.integers(4, horizon)), int(rng.integers(0, self.width - 8))
            mask[top : horizon + 4, left : left + int(rng.integers(4, 16))] = kind
        return mask


SAMPLES = 1797
DARKEST = 16


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8x8 pixels: real, small, needs no download.

    Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998; UCI Machine Learning
    Repository, CC BY 4.0), its test part, as distributed with scikit-learn. `digits.npz` holds the
    pixels (0 to 16) and labels as unsigned bytes, in scikit-learn's order.
    """

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
