"""Attacks that need to know nothing of other clients.

Some send noise or the client's values, changed; others follow the protocol, but train on
other labels or images.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext, DataAttack, DataInfo
from fednorm.registry import param


@dataclass(frozen=True)
class SignFlip(Attack):
    """The client's own values, negated.

    Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic
    Gradient Descent", ICLR 2021, arXiv:2012.14368.

    Client: sends its own update, negated. For statistics it sends its own running mean, negated,
    and its true variance, as in Guerraoui et al., 2024, arXiv:2405.14670, section 5. Where clients
    send moments (`fbn`), it sends the mean that negates the running mean.
    """

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Negate the client's tensor."""
        del context
        return -own

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the true variance."""
        del context
        return own


@dataclass(frozen=True)
class Gaussian(Attack):
    """Normal noise, independent of the data.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine
    Tolerant Gradient Descent", NeurIPS 2017, arXiv:1703.02757, section 5.

    Client: sends normal noise around 0 instead of its update and its running means. A running
    variance becomes the magnitude of such noise; where clients send moments (`fbn`), at least (1-β)
    times the shared one.
    """

    std: float = param(1.0, "standard deviation of the noise, above 0")

    def __post_init__(self) -> None:
        if not 0 < self.std < float("inf"):
            raise ValueError(f"gaussian needs a std above 0, not {self.std}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return noise."""
        # Drawn on the CPU in one number format: the same noise on every device.
        noise = torch.randn(own.shape, generator=context.rng, dtype=torch.float64)
        return (self.std * noise).to(own)

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the magnitude of noise."""
        return self.corrupt(own, context).abs()


@dataclass(frozen=True)
class NonFinite(Attack):
    """NaN or infinity everywhere.

    Client: sends NaN or infinity instead of every value, variances included. A server that
    validates its replies (Guerraoui, Gupta and Pinot, "Byzantine Machine Learning: A Primer", 2023,
    doi:10.1145/3616537) rejects them, names the clients, and continues the round without them.
    """

    value: Literal["nan", "inf"] = param("nan", "'nan' or 'inf'")

    def __post_init__(self) -> None:
        if self.value not in ("nan", "inf"):
            raise ValueError(f"non_finite needs the value 'nan' or 'inf', not {self.value!r}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return NaN or infinity."""
        del context
        return torch.full_like(own, float(self.value))

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return NaN or infinity."""
        return self.corrupt(own, context)


@dataclass(frozen=True)
class ModelReplacement(Attack):
    """The client's own values, scaled up.

    Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor Federated Learning", AISTATS
    2020, arXiv:1807.00459.

    Client: sends its own update times n/f, so that the mean over n clients, f of which do so,
    contains the update itself. Running statistics are scaled as if its data were: the mean by the
    factor, the variance by its square.
    """

    scale: float | None = param(None, "the factor; 'none' is n/f, which outweighs a mean")

    def __post_init__(self) -> None:
        if self.scale is not None and not abs(self.scale) < float("inf"):
            raise ValueError(f"replacement needs a finite scale, not {self.scale}.")

    def corrupt(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the scaled values."""
        return own * self._factor(context)

    def corrupt_variance(self, own: Tensor, context: AttackContext) -> Tensor:
        """Return the variance of scaled data."""
        return own * self._factor(context) ** 2

    def _factor(self, context: AttackContext) -> float:
        return context.clients / context.byzantine if self.scale is None else self.scale


@dataclass(frozen=True)
class LabelFlip(DataAttack):
    """Every label y becomes classes-1-y.

    Allen-Zhu, Ebrahimianghazani, Li and Alistarh, "Byzantine-Resilient Non-Convex Stochastic
    Gradient Descent", ICLR 2021, arXiv:2012.14368.

    Client: trains on the label classes-1-y instead of y, and follows the protocol otherwise. A
    pixel without a label stays without one.
    """

    def poison(
        self, x: Tensor, y: Tensor, info: DataInfo, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the batch with flipped labels."""
        del rng
        return x, torch.where(y < 0, y, info.classes - 1 - y)


@dataclass(frozen=True)
class Backdoor(DataAttack):
    """A white square that the model learns to classify as the target.

    Gu, Dolan-Gavitt and Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning Model
    Supply Chain", 2017, arXiv:1708.06733; in federated learning, Bagdasaryan et al., 2020,
    arXiv:1807.00459.

    Client: puts a white square into the lower right corner of a share of its images, gives these
    the target's label, and follows the protocol otherwise.

    Success: the share of test images of other classes that the model classifies as the target once
    they have the patch. Accuracy hardly shows the attack; this number does.
    """

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
