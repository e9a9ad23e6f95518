"""Batch transforms: normalize, crop and flip all samples of a batch at once.

Images are held once, as uint8. A training batch is cropped and flipped at random, then scaled and
normalized; a test batch is only scaled and normalized.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Batch: TypeAlias = tuple[Tensor, Tensor]

IGNORED = 255  # marks a pixel of a mask that has no label
_NO_LABEL = -100  # which torch's cross entropy ignores


@dataclass(frozen=True, slots=True)
class BatchTransform:
    """The transform of a batch; the default only converts the number format.

    Attributes:
        mean: of each channel, subtracted from pixels between 0 and 1.
        std: standard deviation of each channel, by which they are then divided.
        pad: zeros around a training image, out of which its size is cropped at random.
        window: height and width of a random crop, if not the size of the image.
        flip: whether half of the training images are mirrored.
        channels_last: whether batches have torch's memory format channels_last, in which
            convolutions on a CPU are faster.
        dtype: the number format of a batch.
        device: the device of a batch.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad: int = 0
    window: tuple[int, int] | None = None
    flip: bool = False
    channels_last: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    @property
    def is_random(self) -> bool:
        """Whether training batches are augmented at random."""
        return bool(self.pad or self.window or self.flip)

    def apply_training(self, x: Tensor, y: Tensor, rng: np.random.Generator) -> Batch:
        """Apply the training transform; masks are cropped and flipped with their images."""
        if self.pad or self.window:
            x, y = self._crop(x, y, rng)
        if self.flip:
            mirrored = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)  # noqa: PLR2004
            x = _mirror(x, mirrored)
            y = _mirror(y, mirrored) if y.dim() > 1 else y
        return self.apply_evaluation(x, y)

    def apply_evaluation(self, x: Tensor, y: Tensor) -> Batch:
        """Apply the evaluation transform."""
        if x.dtype == torch.uint8:
            x = x.to(self.device, self.dtype).div_(255)
        x = x.to(self.device, self.dtype if x.is_floating_point() else x.dtype)  # token ids
        if self.mean:
            mean, std = _make_constants(self, x.dim() - 2)
            x = (x - mean).div_(std)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        y = y.to(self.device, self.dtype if y.is_floating_point() else y.dtype)
        return x, y.long().masked_fill(y == IGNORED, _NO_LABEL) if y.dtype == torch.uint8 else y

    def _crop(self, x: Tensor, y: Tensor, rng: np.random.Generator) -> Batch:
        height, width = self.window or x.shape[-2:]
        x = functional.pad(x, (self.pad,) * 4)
        if y.dim() > 1:
            y = functional.pad(y, (self.pad,) * 4, value=IGNORED)
        room = (x.shape[-2] - height, x.shape[-1] - width)
        if min(room) < 0:
            raise ValueError(
                f"images of {tuple(x.shape[-2:])} pixels are smaller than the window "
                f"{(height, width)} that is cut out of them; choose a smaller crop."
            )
        tops, lefts = (rng.integers(0, extra + 1, len(x)) for extra in room)
        places = [
            (..., slice(i, i + height), slice(j, j + width))
            for i, j in zip(tops, lefts, strict=True)
        ]
        cut = torch.stack([image[place] for image, place in zip(x, places, strict=True)])
        if y.dim() == 1:
            return cut, y
        return cut, torch.stack([mask[place] for mask, place in zip(y, places, strict=True)])


@lru_cache
def _make_constants(transform: BatchTransform, axes: int) -> tuple[Tensor, Tensor]:
    """Return mean and std of the channels, shaped to broadcast over `axes` more axes."""
    shape = (-1, *(1,) * axes)
    mean, std = (
        torch.tensor(t, dtype=transform.dtype, device=transform.device)
        for t in (transform.mean, transform.std)
    )
    return mean.view(shape), std.view(shape)


IDENTITY = BatchTransform()


def _mirror(images: Tensor, chosen: Tensor) -> Tensor:
    chosen = chosen.view(-1, *(1,) * (images.dim() - 1))
    return torch.where(chosen, images.flip(-1), images)
