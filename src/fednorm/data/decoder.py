"""Decode image files: known formats only, of a size that memory can hold.

A file that pretends to be an image can be a program for one of Pillow's helpers, a few bytes that
unpack to gigabytes, or a pipe that never ends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fednorm.errors import DamagedDataError
from fednorm.system import open_regular, release_memory

ImageArray: TypeAlias = NDArray[np.uint8]
Decode: TypeAlias = Callable[[Path], ImageArray]

_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP")  # Pillow runs a program for some others
MOST_PIXELS = 89_478_485  # of an image, and of all that are decoded at once; Pillow's own limit
_LARGE = 10_000_000  # pixels


@dataclass(frozen=True, slots=True)
class Decoder:
    """Functions that read images and masks; `settings` identify their results.

    With `skip`, images that cannot be read are left out.
    """

    image: Decode
    settings: str
    mask: Decode | None = None
    skip: bool = False


class _PixelBudget:
    """Lets threads wait until the pixels that they need are free."""

    def __init__(self, free: int) -> None:
        self.free, self.changed = free, threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold a number of pixels within the block."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= count)
            self.free -= count
        try:
            yield
        finally:
            with self.changed:
                self.free += count
                self.changed.notify_all()


_BUDGET = _PixelBudget(MOST_PIXELS)


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image of a known format and a size that memory can hold."""
    with open_regular(path) as file, Image.open(file, formats=_FORMATS) as image:
        pixels = image.width * image.height
        if pixels > MOST_PIXELS:
            raise DamagedDataError(f"it has {pixels} pixels, more than {MOST_PIXELS}")
        with _BUDGET.take(pixels):
            yield image
            image.close()
            if pixels > _LARGE:  # else every thread would keep as much for itself
                release_memory()


def center_crop(size: int | None, channels: int = 3) -> Decoder:
    """Return a decoder that resizes the short side to `size` and crops the centre.

    Without a size, images keep theirs.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 pixel, but is {size}.")

    def decode(path: Path) -> ImageArray:
        with open_image(path) as image:
            if size is not None:  # read a large JPEG at a fraction of its size, at least twice it
                image.draft(None, (2 * size, 2 * size))
            return to_array(image, size, channels)

    return Decoder(decode, f"square {size} {channels}")


def to_array(image: Image.Image, size: int | None, channels: int) -> ImageArray:
    """Convert an image to channels x height x width; with a size, crop its centre."""
    converted = image.convert("RGB" if channels == 3 else "L")  # noqa: PLR2004 (red, green, blue)
    if size is not None and converted.size != (size, size):
        converted = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(converted)
    return np.ascontiguousarray(array.transpose(2, 0, 1)) if array.ndim > 2 else array[None]  # noqa: PLR2004


def resize(size: tuple[int, int]) -> Decode:
    """Return a function that reads an image and resizes it to (height, width)."""
    height, width = size

    def decode(path: Path) -> ImageArray:
        with open_image(path) as image:
            resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return to_array(resized, None, 3)

    return decode
