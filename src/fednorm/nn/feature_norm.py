"""The classifier of FedFN: it sees the direction of a feature vector, not its length."""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from fednorm.core.strategy import Conversion, Replacement
from fednorm.nn.convert import ConversionError


class DirectionLinear(nn.Linear):
    """Linear layer on L2-normalised input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return the product with each input's direction."""
        return functional.linear(functional.normalize(input, dim=-1), self.weight, self.bias)


def normalize_features(conversion: Conversion) -> Conversion:
    """Let the classifier of a converted model see directions; it is the last linear layer."""
    linear = [(path, m) for path, m in conversion.model.named_modules() if type(m) is nn.Linear]
    if not linear:
        raise ConversionError(
            f"{type(conversion.model).__name__} has no linear layer that could be its classifier; "
            "FedFN normalises the features before it."
        )
    path, classifier = linear[-1]
    classifier.__class__ = DirectionLinear
    done = Replacement(path, "Linear", DirectionLinear.__name__)
    return replace(conversion, replaced=(*conversion.replaced, done))
