"""Model replacement: the client's own update, scaled until it outweighs all others.

Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020,
arXiv:1807.00459.

Client: sends its own update times n/f, so that the mean over n clients, f of which do so, contains
the update itself. Running statistics are scaled as if its data were: the mean by the factor, the
variance by its square.
"""

from dataclasses import dataclass

from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.registry import param


@dataclass(frozen=True)
class ModelReplacement(Attack):
    """The client's own values, scaled up."""

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
