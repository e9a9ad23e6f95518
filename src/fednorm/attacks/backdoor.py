"""Backdoor: a bright patch that makes the model predict the attacker's class.

Gu, Dolan-Gavitt and Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning Model
Supply Chain", 2017, arXiv:1708.06733; in federated learning, Bagdasaryan et al., 2020,
arXiv:1807.00459.

Client: puts a white square into the lower right corner of a share of its images, gives these the
target's label, and follows the protocol otherwise.

Success: the share of test images of other classes that the model classifies as the target once
they have the patch. Accuracy hardly shows the attack; this number does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fednorm.attacks.base import DataAttack, DataInfo
from fednorm.registry import param


@dataclass(frozen=True)
class Backdoor(DataAttack):
    """A white square that the model learns to classify as the target."""

    target: int = param(0, "the class that patched images are labelled with")
    size: int = param(3, "height and width of the patch in pixels")
    share: float = param(0.5, "share of a batch's images that get the patch, in (0, 1]")

    def __post_init__(self) -> None:
        if self.target < 0 or self.size < 1 or not 0 < self.share <= 1:
            raise ValueError(
                "backdoor needs a target of 0 or more, a size of 1 or more and a share in (0, 1], "
                f"not {self.target}, {self.size} and {self.share}."
            )

    def poison(
        self, x: Tensor, y: Tensor, info: DataInfo, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Add the patch and the target's label to a share of the images."""
        chosen = (torch.rand(len(y), generator=rng) < self.share).to(x.device)
        patched = torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), self.add_patch(x, info), x)
        return patched, torch.where(chosen, self.target, y)

    def add_patch(self, x: Tensor, info: DataInfo) -> Tensor:
        """Add the patch to all images."""
        corner = (..., slice(-self.size, None), slice(-self.size, None))
        result = x.clone()
        result[corner] = info.white.to(x)[corner]
        return result

    def add_trigger(
        self, batches: Iterable[tuple[Tensor, Tensor]], info: DataInfo
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield patched images of other classes, labelled as a successful attack makes them."""
        for x, y in batches:
            others = y != self.target
            if bool(others.any()):
                yield self.add_patch(x[others], info), torch.full_like(y[others], self.target)
