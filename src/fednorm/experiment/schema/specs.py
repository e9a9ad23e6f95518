"""One choice of a configuration: a name with its fields, written as text or as a table."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fednorm.errors import ConfigError
from fednorm.names import RENAMED, unknown
from fednorm.registry import Registry, parse_call, split_outside
from fednorm.strategies import STRATEGIES

T = TypeVar("T")

_MOST_STRATEGIES = 1000  # with those of sweeps
_MOST_SEEDS = 10_000
_LONGEST = 200  # characters of a label: it names a folder

# Keys of the experiment that say which clients fail, and what the server does about it.
THREATS = (
    "attack",
    "attack_target",
    "byzantine",
    "aggregator",
    "statistics_aggregator",
    "client_dropout",
    "min_replies",
    "max_examples",
    "outlier_factor",
    "rollback",
    "secure",
    "privacy",
)
# Keys of the experiment that an entry may set for itself.
OWN_SETTINGS = (
    "data",
    "model",
    "loss",
    "partition",
    "clients",
    "participation",
    "algorithm",
    "rounds",
    "batch_size",
    "local_steps",
    "local_epochs",
    "eval_every",
    "evaluate",
    "adapt_statistics",
    "unseen_clients",
    "unseen_init",
    "engine",
    "diagnose",
    "dtype",
    "precision",
    *THREATS,
)


class Spec(BaseModel):
    """`"fbn"`, `"fbn(stats_momentum=0.05)"`, or `{name = "fbn", stats_momentum = 0.05}`."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return read_entry(value)
        if not isinstance(value, Spec | Mapping):
            raise ValueError(f"{value!r} is not a name, nor a table with a name and fields.")  # noqa: TRY004 (pydantic reports ValueError)
        if isinstance(value, Mapping) and "name" not in value:
            raise ValueError(f"{dict(value)!r} needs a name.")
        return value

    @property
    def fields(self) -> dict[str, Any]:
        """The keys of the table other than the name; the text "none" means no value."""
        extra = self.__pydantic_extra__ or {}
        return {key: None if value == "none" else value for key, value in extra.items()}


class StrategySpec(Spec):
    """A strategy; `centralized` is the reference on one machine, as is `centralized:gn`.

    Besides fields of the strategy it may set keys of the experiment for itself, and `lr`, which is
    short for `algorithm = {lr = …}`:
    `{name = "fbn", lr = 0.1, statistics_aggregator = "median", label = "fbn, median"}`.
    """

    label: str = ""

    @model_validator(mode="before")
    @classmethod
    def _move_rate(cls, value: Any) -> Any:
        if isinstance(value, str) and "(" in value:  # its fields tell it from others of the name
            value = {**read_entry(value), "label": value}
        if not isinstance(value, Mapping) or "lr" not in value:
            return value
        rest = {key: part for key, part in value.items() if key != "lr"}
        return merge_tables(rest, {"algorithm": {"lr": value["lr"]}})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.label.isprintable() or len(self.label) > _LONGEST:
            raise ValueError(
                f"a label has at most {_LONGEST} characters that can be printed, unlike "
                f"{self.label[:_LONGEST]!r}."
            )
        for key in self.__pydantic_extra__ or {}:
            if RENAMED.get(key) in OWN_SETTINGS:
                raise unknown("key", key, OWN_SETTINGS)
        if ":" not in self.strategy and self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, [*STRATEGIES.list_names(), "centralized"])
        return self

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
        """The name of the strategy; the reference uses ordinary BatchNorm by default."""
        return (self.name.partition(":")[2] or "naive") if self.centralized else self.name

    @property
    def known_fields(self) -> set[str]:
        """The names of all fields that the strategy has."""
        return {field.name for field in dataclasses.fields(STRATEGIES.find(self.strategy))}  # type: ignore[arg-type]

    @property
    def title(self) -> str:
        """The name of the run in tables and plots."""
        return self.label or self.name

    @property
    def folder(self) -> str:
        """The name of its runs on disk."""
        return re.sub(r"[^\w.=-]+", "_", self.title)


class PrivacySpec(BaseModel):
    """`{clip = 1.0, noise = 1.0}`: differential privacy at client level."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    clip: float = Field(gt=0, description="largest L2 norm of a client's update")
    noise: float = Field(
        ge=0, description="standard deviation of the noise on the sum of updates, times clip"
    )
    clip_statistics: float = Field(
        default=1.0, gt=0, description="largest L2 norm of a client's statistics, in shared units"
    )
    noise_statistics: float | None = Field(
        default=None, ge=0, description="as noise, of statistics; the same if not given"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ of the guarantee")

    def check(self, experiment: Any) -> None:
        """Raise ValueError if something of the experiment would void the guarantee."""
        if reason := next(self._list_leaks(experiment), None):
            raise ValueError(f"with privacy, {reason}.")

    def _list_leaks(self, experiment: Any) -> Iterator[str]:
        trained = experiment.clients - experiment.unseen_clients
        if self.delta >= 1 / trained:
            yield f"delta must be below 1/{trained}, one over the clients, unlike {self.delta:g}"
        if experiment.participation * trained < 1:
            yield "at least one client must be expected in a round; raise participation or clients"
        if experiment.engine == "flower":
            yield (
                "engine 'flower' is refused: nodes get the seed of the run, of which the noise is "
                "made, and could subtract it; choose another engine"
            )
        keys = ("aggregator", "statistics_aggregator")
        for key, rule in zip(keys, experiment.aggregators, strict=True):
            if not rule.uses_weights:
                yield f"{key} must be 'mean': robust rules depend on every client"
        told = {
            "attack": "Byzantine clients would send what they know of the others' replies",
            "rollback": "which rounds are undone tells the clients' losses",
            "diagnose": "it publishes statistics and gradients without noise",
            "adapt_statistics": "it tests on the clients' data",
            "unseen_clients": "test splits have the mix of classes of the clients' data",
        }
        for key, reason in told.items():
            if value := getattr(experiment, key):
                name = value.name if isinstance(value, Spec) else value
                yield f"{key} = {name!r} is refused: {reason}; leave it out"
        if experiment.evaluate == "clients":
            yield (
                "evaluate = 'clients' is refused: test splits have the mix of classes of the "
                "clients' data; choose 'auto'"
            )
        if experiment.min_replies > 1:
            yield "min_replies must be 1: which rounds are repeated tells who answered"


def describe_setting(key: str, value: Any, error: ValidationError) -> str:
    """Return what is wrong with a key that a strategy sets for itself."""
    first = error.errors()[0]
    if key == "privacy" and first["type"] == "extra_forbidden":
        return str(
            unknown("key of the table [privacy]", str(first["loc"][-1]), PrivacySpec.model_fields)
        )
    where = ".".join(map(str, (key, *first["loc"])))
    return f"{where} = {value!r} is not valid: {first['msg'].lower()}."


def merge_tables(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with changes; tables are merged key by key; a name counts as a table.

    >>> merge_tables({"data": "digits", "rounds": 9}, {"data": {"test": 10}})
    {'data': {'name': 'digits', 'test': 10}, 'rounds': 9}
    """
    result = dict(values)
    for key, new in changes.items():
        old = result.get(key)
        table = read_entry(old) if isinstance(old, str) and isinstance(new, Mapping) else old
        both = isinstance(table, Mapping) and isinstance(new, Mapping)
        result[key] = merge_tables(table, new) if both else new  # type: ignore[arg-type]  # both are tables
    return result


def read_entry(text: str) -> dict[str, Any]:
    """Read a name, with fields in brackets if it has some, as a table.

    >>> read_entry("mlp(hidden=(8, 4))"), read_entry("mine:net")
    ({'hidden': [8, 4], 'name': 'mlp'}, {'name': 'mine:net'})
    """
    name, fields = parse_call(text, "field=2") or (text, {})
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}
    return {**plain, "name": name}


def create_entry(registry: Registry[T], name: str, fields: Mapping[str, Any]) -> T:
    """Create an entry of a registry from values of a file or a command line."""
    cls = registry.find(name)
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
            raise ConfigError(
                f"{registry.kind} {name!r}: {key} = {value!r} is not valid: {reason}."
            ) from None
    return registry.create(name, checked)


def parse_seeds(value: Any) -> Any:
    """Read a number n of seeds as the seeds 0 to n-1."""
    try:
        if isinstance(value, str):
            value = [int(part) for part in value.split(",")] if "," in value else int(value)
    except ValueError:
        raise ValueError(f"seeds are a number or a list such as 0,7, not {value!r}.") from None
    if isinstance(value, int) and value < 1:
        raise ValueError(f"at least 1 seed is needed, not {value}; a list names them: 0,7.")
    if isinstance(value, int) and value > _MOST_SEEDS:
        raise ValueError(f"seeds are at most {_MOST_SEEDS}, not {value}; a list names the seeds.")
    return list(range(value)) if isinstance(value, int) else value


def split_list(value: Any) -> Any:
    """Read "a,b(c=1)" as a list of strategies; refuse a longer one than can be compared."""
    if isinstance(value, str):
        value = [part.strip() for part in split_outside(value, ",") if part.strip()]
    if isinstance(value, list | tuple):
        check_number(len(value))
    return value


def name_metrics(value: Any) -> Any:
    """Return metrics by name; one without a name is called as its function is.

    >>> name_metrics("mine:f1,mine:mae")
    {'f1': {'name': 'mine:f1'}, 'mae': {'name': 'mine:mae'}}
    """
    if value is None or value == "none":
        return None
    listed = split_list(value)
    if isinstance(listed, Mapping):
        return listed or None
    if not isinstance(listed, list | tuple):
        raise ValueError(f"metrics are a list or a table of names, not {value!r}.")  # noqa: TRY004 (pydantic reports ValueError)
    named: dict[str, Any] = {}
    for one in listed:
        table = Spec.model_validate(one).model_dump()
        label = str(table.pop("label", table["name"].rpartition(":")[2]))
        if label in named:
            raise ValueError(f"two metrics are called {label!r}; give them names in a table.")
        named[label] = table
    return named or None


def flatten_choices(table: Any, prefix: str = "") -> dict[str, Any]:
    """Return a table of lists by dotted keys: TOML nests `algorithm.lr`.

    >>> flatten_choices({"algorithm": {"lr": [0.1, 1.0]}})
    {'algorithm.lr': [0.1, 1.0]}
    """
    if not isinstance(table, Mapping):
        said = f"lists of values are given by key, as in {{lr = [0.01, 0.1]}}, not {table!r}."
        raise ValueError(said)  # noqa: TRY004 (pydantic reports ValueError)
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, Mapping)
        flat |= flatten_choices(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def parse_choice(value: Any) -> Any:
    """Read "none" as no choice."""
    return None if value == "none" else value


def check_number(count: int) -> None:
    """Refuse more strategies than can be compared."""
    if count > _MOST_STRATEGIES:
        raise ConfigError(
            f"an experiment has at most {_MOST_STRATEGIES} strategies, not {count}; use fewer, or "
            "fewer values of a sweep."
        )
