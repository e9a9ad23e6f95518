"""One choice of a configuration: a name with its fields, written as text or as a table."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from fednorm.registry import create, find

T = TypeVar("T")

# Keys of the experiment that an entry may set for itself.
OWN_SETTINGS = (
    "attack",
    "attack_target",
    "byzantine",
    "aggregator",
    "statistics_aggregator",
    "client_dropout",
    "min_replies",
)


class Spec(BaseModel):
    """`"fbn"`, or `{name = "fbn", momentum = 0.05}`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def fields(self) -> dict[str, Any]:
        """What the table says beside the name; the text "none" stands for no value."""
        extra = self.__pydantic_extra__ or {}
        return {key: None if value == "none" else value for key, value in extra.items()}


class StrategySpec(Spec):
    """A strategy; `centralized` is the reference on one machine, as is `centralized:gn`.

    Beside fields of the strategy it may set some keys of the experiment for itself:
    `{name = "fbn", byzantine = 3, aggregate_statistics = "median", label = "fbn, median"}`.
    """

    label: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The strategy's fields."""
        return {key: value for key, value in super().fields.items() if key not in OWN_SETTINGS}

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the experiment that this entry sets for itself."""
        return {key: value for key, value in super().fields.items() if key in OWN_SETTINGS}

    @property
    def centralized(self) -> bool:
        """Whether this is a reference run that merges all clients' batches."""
        return self.name.partition(":")[0] == "centralized"

    @property
    def strategy(self) -> str:
        """The name of the strategy; the reference uses ordinary BatchNorm unless it says else."""
        return (self.name.partition(":")[2] or "naive") if self.centralized else self.name

    @property
    def title(self) -> str:
        """What the run is called in tables and plots."""
        return self.label or self.name

    @property
    def folder(self) -> str:
        """What its runs are called on disk."""
        return re.sub(r"[^\w.=-]+", "_", self.title)


def create_entry(
    kind: str, registry: Mapping[str, type[T]], name: str, fields: Mapping[str, Any]
) -> T:
    """Make a registered dataclass from values that came from a file or a command line."""
    cls = find(kind, registry, name)
    adapters = {
        f.name: TypeAdapter(f.type)
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]  # entries are dataclasses
        if not isinstance(f.type, str)
    }
    checked = {}
    for key, value in fields.items():
        try:
            checked[key] = adapters[key].validate_python(value) if key in adapters else value
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ValueError(
                f"{kind} {name!r}: {key} = {value!r} is not valid: {reason}."
            ) from None
    return create(kind, registry, name, checked)
