"""What warnings and advice are read off."""

from collections.abc import Sequence
from dataclasses import dataclass

from fednorm.doctor.findings import Clients, Cost, Layer, State
from fednorm.experiment.config import Experiment


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model and its setting."""

    experiment: Experiment
    layers: Sequence[Layer]
    state: State
    costs: Sequence[Cost]
    clients: Clients | None  # None if there is no data

    @property
    def batch_norms(self) -> list[Layer]:
        """The BatchNorm layers."""
        return [layer for layer in self.layers if layer.batch_norm]

    @property
    def single_valued(self) -> list[Layer]:
        """The BatchNorm layers that have one value per channel of a sample."""
        return [layer for layer in self.batch_norms if layer.values == 1]

    @property
    def refusing(self) -> list[str]:
        """The strategies that refuse the model."""
        return [cost.strategy for cost in self.costs if cost.refused]

    @property
    def taking_part(self) -> tuple[int, int]:
        """How many clients take part in a round, and of how many."""
        trained = self.experiment.clients - self.experiment.unseen
        return max(1, round(self.experiment.participation * trained)), trained

    def cost(self, strategy: str) -> Cost | None:
        """Return the cost of a strategy that is registered and takes the model."""
        found = [c for c in self.costs if c.strategy == strategy and not c.refused]
        return found[0] if found else None
