"""The whole of an examination; `to_json` is the file that `fednorm doctor` writes."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fednorm.doctor.findings import Caution, Clients, Cost, Layer, Model, Recommendation, State


@dataclass(frozen=True, slots=True)
class Report:
    """What will happen to a model in federated learning, in numbers."""

    schema: int
    model: Model
    layers: tuple[Layer, ...]
    state: State
    strategies: tuple[Cost, ...]
    warnings: tuple[Caution, ...]
    clients: Clients | None
    recommendation: Recommendation

    def to_json(self) -> str:
        """Return the report as JSON; what is not a finite number is null."""
        return json.dumps(_finite(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
