"""GroupNorm instead of BatchNorm, and weight-standardised convolutions.

Qiao, Wang, Liu, Shen and Yuille, "Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization", 2019, arXiv:1903.10520; GroupNorm: Wu and He, 2018, arXiv:1803.08494.

Client: normalises each group of channels of each sample by its own moments, and convolves with
kernels standardised to mean 0 and variance 1 per output channel, (w - mean)/√(var + 1e-6), but for
convolutions that no normalization layer comes after.

Server: averages everything, the kernels as they were before standardisation; there are no
statistics. γ and β of the replaced layers are kept.

Deviation: the authors' code divides by the unbiased standard deviation plus 1e-5; this is the
formula of their text, with a smaller constant, as the kernels of wide layers have small variances.
"""

from dataclasses import dataclass, replace

from torch import nn

from fednorm.core.strategy import Conversion
from fednorm.nn.weight_std import standardize
from fednorm.strategies.gn import GN

EPS = 1e-6


@dataclass(frozen=True)
class GnWs(GN):
    """GroupNorm instead of BatchNorm, and weight-standardised convolutions."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy with GroupNorm layers and standardised convolutions."""
        norms = super().convert(model)
        convs = standardize(
            norms.model, scale_by_fan_in=False, eps=EPS, gain=False, bias=True, before_norms=True
        )
        if not convs.replaced:
            raise ValueError(
                f"GnWs needs convolutions, but {type(model).__name__} has none; choose 'gn'."
            )
        return replace(norms, model=convs.model, replaced=norms.replaced + convs.replaced)
