"""Points around a circle, one cloud per class: the setting of FBN's Figure 1.

Guerraoui, Pinot, Rizk, Stephan and Taiani, "Overcoming the Challenges of Batch Normalization in
Federated Learning" (2024), arXiv:2405.14670, section 3. Class i is normal around
`10 (cos a, sin a)` with variance 1, and has 30 points. The paper prints the angle as
`(2 pi i - 1) / 10`; here it is `2 pi i / classes`: the same ring, turned by 0.1 radian.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fednorm.core.registry import param
from fednorm.data.dataset import Dataset, random_generator

TAG = 102


@dataclass(frozen=True, slots=True)
class Ring:
    """Points in the plane around a circle, one class per cloud; the natural group is the class."""

    classes: int = param(10, "how many clouds lie on the circle")
    samples_per_class: int = param(30, "points per cloud, in training and again in testing")
    radius: float = param(10.0, "radius of the circle")
    std: float = param(1.0, "standard deviation of each coordinate within a cloud")

    def __post_init__(self) -> None:
        """Check the counts and sizes."""
        for field, least in (("classes", 1), ("samples_per_class", 1), ("radius", 0), ("std", 0)):
            value = getattr(self, field)
            if not least <= value < math.inf:
                raise ValueError(
                    f"data set 'ring' needs a finite {field} of at least {least}, but got {value}."
                )

    def load(self, seed: int) -> Dataset:
        """Return the points drawn with the seed.

        >>> ring = Ring().load(seed=0)
        >>> ring.shape, len(ring.y), ring.classes
        ((2,), 300, 10)
        """
        rng = random_generator(seed, TAG)
        y = np.repeat(np.arange(self.classes), self.samples_per_class)
        x, x_test = self.points(y, rng), self.points(y, rng)
        labels = torch.tensor(y)
        return Dataset("ring", x, labels, x_test, labels, self.classes, groups=y, groups_test=y)

    def points(self, y: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Draw one point per label."""
        angle = 2 * np.pi * y / self.classes
        centre = self.radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        points = centre + self.std * rng.standard_normal(centre.shape)
        return torch.from_numpy(points).float()
