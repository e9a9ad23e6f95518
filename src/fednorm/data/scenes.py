"""Made-up street scenes in which every pixel has a class: segmentation without a download.

Sky above, road below, and rectangles of further classes between them, each class in a colour of its
own under noise. Every city has its own light, by which its scenes are brighter or darker. A border
of two pixels has no label, as the car that carries the camera in Cityscapes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fednorm.core.registry import param
from fednorm.data.dataset import Dataset, random_generator
from fednorm.data.look import IGNORED, Look

TAG = 103
BORDER = 2


@dataclass(frozen=True, slots=True)
class Scenes:
    """Made-up scenes to segment; the natural group of a scene is its city."""

    samples: int = param(120, "how many training scenes")
    test: int = param(40, "how many test scenes")
    height: int = param(48, "pixels from top to bottom")
    width: int = param(64, "pixels from left to right")
    classes: int = param(5, "sky, road, and kinds of things between them")
    cities: int = param(6, "how many cities there are")

    def __post_init__(self) -> None:
        """Check the counts."""
        for field, least in {
            "samples": 1, "test": 1, "height": 16, "width": 16, "classes": 3, "cities": 1
        }.items():  # fmt: skip
            if getattr(self, field) < least:
                raise ValueError(
                    f"data set 'scenes' needs {field} of at least {least}, but got "
                    f"{getattr(self, field)}."
                )

    def load(self, seed: int) -> Dataset:
        """Return the scenes drawn with the seed.

        >>> scenes = Scenes(samples=4, test=2).load(seed=0)
        >>> scenes.shape, tuple(scenes.y.shape), scenes.metric
        ((3, 48, 64), (4, 48, 64), 'mean IoU')
        """
        rng = random_generator(seed, TAG)
        colours = rng.integers(40, 200, (self.classes, 3))
        x, y, cities = self._drawn(self.samples, colours, rng)
        x_test, y_test, cities_test = self._drawn(self.test, colours, rng)
        return Dataset(
            "scenes",
            torch.from_numpy(x),
            torch.from_numpy(y),
            torch.from_numpy(x_test),
            torch.from_numpy(y_test),
            self.classes,
            groups=cities,
            groups_test=cities_test,
            look=Look(mean=(0.5,) * 3, std=(0.25,) * 3),
        )

    def _drawn(
        self, count: int, colours: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        masks = np.stack([self._mask(rng) for _ in range(count)])
        cities = np.arange(count) % self.cities
        light = 20 * (cities - (self.cities - 1) / 2)
        pixels = colours[masks].transpose(0, 3, 1, 2) + light[:, None, None, None]
        pixels = pixels + 15 * rng.standard_normal(pixels.shape)
        labels = np.full_like(masks, IGNORED)
        inner = (slice(None), slice(BORDER, -BORDER), slice(BORDER, -BORDER))
        labels[inner] = masks[inner]
        return pixels.clip(0, 255).astype(np.uint8), labels, cities

    def _mask(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        mask = np.zeros((self.height, self.width), np.uint8)
        horizon = self.height // 2 + int(rng.integers(-4, 5))
        mask[horizon:] = 1
        for _ in range(4):
            kind = int(rng.integers(2, self.classes))
            top, left = int(rng.integers(4, horizon)), int(rng.integers(0, self.width - 8))
            mask[top : horizon + 4, left : left + int(rng.integers(4, 16))] = kind
        return mask
