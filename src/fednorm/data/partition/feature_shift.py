"""Every client sees its samples transformed differently; labels are iid, or dealt as asked.

`shift` is the additive one of Unbitrium's tutorial 091, 0.5 (2i/n - 1) for client i of n. The
others are spread over p from -1 (first client) to 1 (last client): `brightness` multiplies by 2^p,
`contrast` multiplies the difference to the sample's mean by 2^p, `rotation` turns by 30 p degrees,
`noise` adds normal noise of standard deviation 0.25 (1 + p). `strength` multiplies the shift, p,
the angle or the standard deviation. Hospitals differ in their patients, too: "dirichlet=0.3 +
feature_shift=contrast" deals the labels by the first partition and transforms by the second.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fednorm.core.random_streams import Stream
from fednorm.data.partition import create_partition
from fednorm.data.partition.base import Indices, Partition
from fednorm.names import unknown
from fednorm.registry import param

DEGREES = 30.0


@dataclass(frozen=True, slots=True)
class ClientPosition:
    """A client's number among all clients, and the run's seed."""

    client: int
    clients: int
    seed: int

    @property
    def spread(self) -> float:
        """From -1 for the first client to 1 for the last one; 0 for a single client."""
        return 2 * self.client / (self.clients - 1) - 1 if self.clients > 1 else 0.0


def scale_contrast(x: Tensor, position: ClientPosition, strength: float) -> Tensor:
    """Scale the sample around its mean."""
    mean = x.mean(dim=tuple(range(1, x.dim())), keepdim=True)
    return mean + (x - mean) * 2 ** (strength * position.spread)


def rotate(x: Tensor, position: ClientPosition, strength: float) -> Tensor:
    """Rotate images counter-clockwise about their centre; new pixels are 0."""
    if x.dim() != 4:  # noqa: PLR2004 (as listed below)
        raise ValueError(
            "feature shift 'rotation' needs images of shape (samples, channels, height, width), "
            f"but got {tuple(x.shape)}; choose another kind of shift for this data."
        )
    angle = math.radians(DEGREES * strength * position.spread)
    height, width = x.shape[2:]
    cos, sin = math.cos(angle), math.sin(angle)
    # affine_grid counts in half widths and half heights: the ratios keep it a rotation in pixels.
    turn = x.new_tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])
    grid = functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def add_noise(x: Tensor, position: ClientPosition, strength: float) -> Tensor:
    """Add noise drawn for this client, the same on every device."""
    entropy = np.random.SeedSequence([position.seed, position.client, Stream.FEATURE_NOISE])
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
    drawn = torch.randn(x.shape, generator=generator).to(x)
    return x + drawn * (strength * 0.25 * (1 + position.spread))


KINDS: dict[str, Callable[[Tensor, ClientPosition, float], Tensor]] = {
    "shift": lambda x, at, strength: x + strength * 0.5 * (2 * at.client / at.clients - 1),
    "brightness": lambda x, at, strength: x * 2 ** (strength * at.spread),
    "contrast": scale_contrast,
    "rotation": rotate,
    "noise": add_noise,
}


@dataclass(frozen=True, slots=True)
class FeatureShift(Partition):
    """Features changed per client: shift, brightness, contrast, rotation or noise; labels iid."""

    argument: ClassVar[str | None] = "kind"

    kind: str = param("shift", "what differs: shift, brightness, contrast, rotation or noise")
    strength: float = param(1.0, "strength of the difference; 0 is none")
    labels: str = param("iid", "how labels are dealt: a partition, such as 'dirichlet=0.3'")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of feature shift", self.kind, KINDS)
        if not 0 <= self.strength < math.inf:
            raise ValueError(
                f"partition 'feature_shift' needs a finite strength of at least 0, but got "
                f"{self.strength}."
            )
        if isinstance(create_partition(self.labels), FeatureShift):
            raise ValueError(  # noqa: TRY004 (the text is wrong, not its type)
                "partition 'feature_shift' deals labels by another partition, not by itself; "
                "write for example 'dirichlet=0.3 + feature_shift=contrast'."
            )

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Deal the samples as the partition of the labels does."""
        return create_partition(self.labels).split(labels, clients, rng, groups)

    def transform(self, x: Tensor, client: int, clients: int, seed: int) -> Tensor:
        """Return the samples as this client sees them.

        The same call gives the same noise: for test samples, pass another seed than for training.

        >>> FeatureShift().transform(torch.zeros(1, 2), client=0, clients=10, seed=0)
        tensor([[-0.5000, -0.5000]])
        """
        return KINDS[self.kind](x, ClientPosition(client, clients, seed), self.strength)
