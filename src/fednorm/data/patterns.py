"""Noise images with a bright 3x3 block whose place tells the class.

The images of Unbitrium's tutorial 091 ("FL Batch Normalization", class BNDataset). There,
`np.random.seed` was to seed data that torch drew, so it did not; here everything comes from one
generator made from the seed, and no global generator is touched.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fednorm.core.registry import param
from fednorm.data.dataset import Dataset

BLOCK = 3
BRIGHTNESS = 2.0


@dataclass(frozen=True, slots=True)
class Patterns:
    """Standard normal noise images, plus 2 on a 3x3 block at the place of the class."""

    samples: int = param(1000, "how many training images")
    test: int = param(500, "how many test images")
    size: int = param(28, "height and width of an image")
    classes: int = param(10, "how many classes, at most `size`: beyond that places repeat")
    channels: int = param(1, "how many channels; noise in each, the block in all")

    def __post_init__(self) -> None:
        """Check the counts, and that no two classes share a place."""
        for field in ("samples", "test", "size", "classes", "channels"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"data set 'patterns' needs {field} of at least 1, but got "
                    f"{getattr(self, field)}."
                )
        if self.classes > self.size:
            raise ValueError(
                f"data set 'patterns' needs classes <= size, because places repeat after size "
                f"classes, but got classes={self.classes} and size={self.size}; use larger images."
            )

    def load(self, seed: int) -> Dataset:
        """Return the images drawn with the seed.

        >>> patterns = Patterns(samples=20, test=10).load(seed=0)
        >>> patterns.shape, len(patterns.y), len(patterns.y_test)
        ((1, 28, 28), 20, 10)
        """
        generator = Generator().manual_seed(seed)
        x, y = self._images(self.samples, generator)
        x_test, y_test = self._images(self.test, generator)
        return Dataset("patterns", x, y, x_test, y_test, self.classes)

    def _images(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw noise and labels, then add each label's block."""
        x = torch.randn(count, self.channels, self.size, self.size, generator=generator)
        y = torch.randint(self.classes, (count,), generator=generator)
        for label in range(self.classes):
            row, column = label % self.size, (3 * label) % self.size
            x[y == label, :, row : row + BLOCK, column : column + BLOCK] += BRIGHTNESS
        return x, y
