"""Images of noise in the layouts that data sets come in."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def draw():
    """Write images of noise, and return their pixels as height x width x channels."""

    def write(path, size=(8, 8), seed=0, mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = size if mode == "L" else (*size, 3)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return pixels

    return write
