"""The schema of an experiment: one description for the command line, TOML files and Python."""

import dataclasses
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.data import DATASETS
from fednorm.data.partition import create_partition
from fednorm.experiment.callbacks import parse_callbacks
from fednorm.experiment.schema.checks import (
    check_callbacks,
    check_objective,
    check_rates,
    check_strategy_fields,
    check_sums,
    check_threats,
    check_tuning,
    choose_device,
)
from fednorm.experiment.schema.specs import (
    THREATS,
    PrivacySpec,
    Spec,
    StrategySpec,
    create_entry,
    describe_setting,
    flatten_choices,
    merge_tables,
    name_metrics,
    parse_choice,
    parse_seeds,
    split_list,
)
from fednorm.models import MODELS
from fednorm.registry import Registry
from fednorm.strategies import STRATEGIES

if TYPE_CHECKING:  # torch is imported when an experiment is checked, not when its keys are listed
    from fednorm.algorithms.dsgd import DSGD
    from fednorm.algorithms.fedavg import FedAvg
    from fednorm.attacks import Attack
    from fednorm.core.aggregation import Aggregator
    from fednorm.core.algorithm import Algorithm
    from fednorm.core.strategy import Strategy
    from fednorm.data.partition import Partition
    from fednorm.data.sampling import Plan


_MOST = 10**9  # of clients, rounds, samples, seconds, gigabytes
_SEEDS, _MOST_THREADS = 2**63, 1024


def _count(default: int | None, description: str) -> Any:
    """Return the field of a positive number."""
    return Field(default=default, ge=1, le=_MOST, description=description)


class Experiment(BaseModel):
    """An experiment. The defaults are the demonstration: 8×8 digits, one digit per client."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    strategies: Annotated[list[StrategySpec], BeforeValidator(split_list)] = Field(
        default=["centralized", "naive", "fixbn", "fbn", "gn"],
        validate_default=True,
        min_length=1,
        description="compared methods",
    )
    strategy: dict[str, Any] = Field(
        default={}, description="fields for all strategies that have them"
    )
    tune: Annotated[dict[str, list[Any]], BeforeValidator(flatten_choices)] = Field(
        default={},
        description="values each strategy chooses from, on validation data: {lr = [0.01, 0.1]}",
    )
    data: Spec = Field(
        default="digits", validate_default=True, description="data set, or package.module:function"
    )
    model: Spec = Field(
        default="mlp", validate_default=True, description="network, or package.module:function"
    )
    loss: Annotated[Spec | None, BeforeValidator(parse_choice)] = Field(
        default=None,
        description="package.module:function of (outputs, targets); the mean over the batch. By "
        "default it depends on the targets: cross-entropy, mean squared error of numbers, or "
        "binary cross-entropy of several labels",
    )
    metrics: Annotated[dict[str, Spec] | None, BeforeValidator(name_metrics)] = Field(
        default=None,
        description="tested too: package.module:function, or several; of (outputs, targets) on the "
        "whole test set, or with update, compute and reset; a list, or a table by name",
    )
    partition: str = Field(default="gamma=0", description="how data is divided among clients")
    clients: int = _count(10, "number of clients")
    participation: float = Field(
        default=1.0, gt=0, le=1, description="share of clients that take part in a round"
    )
    algorithm: Spec = Field(
        default={"name": "dsgd", "lr": 0.05, "momentum": 0.9},
        validate_default=True,
        description="training algorithm",
    )
    rounds: int = _count(600, "number of rounds")
    batch_size: int = _count(20, "samples in a mini-batch")
    local_steps: int | None = _count(None, "local steps per round")
    local_epochs: int | None = _count(None, "local epochs per round")
    seeds: Annotated[list[int], BeforeValidator(parse_seeds)] = Field(
        default=[0, 1, 2], min_length=1, description="one run per strategy and seed"
    )
    eval_every: int | None = _count(
        None, "rounds between evaluations; about 60 in all if not given"
    )
    evaluate: Literal["auto", "global", "clients"] = Field(
        default="auto",
        description="tested on: auto, global or clients; 'auto' tests a global model on all test "
        "samples and personal ones each on its client's split, 'global' personal ones on all test "
        "samples too, in the mean over clients, 'clients' a global model on each split too",
    )
    adapt_statistics: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="at evaluation, share of statistics that each client re-estimates on its own "
        "unlabelled data",
    )
    unseen_clients: int = Field(
        default=0, ge=0, le=_MOST, description="clients that never train and are only tested"
    )
    unseen_init: Literal["average", "initial"] = Field(
        default="average",
        description="personal layers of clients that never trained: the average of the trained "
        "ones, or the initial ones",
    )
    attack: Annotated[Spec | None, BeforeValidator(parse_choice)] = Field(
        default=None, description="attack of the Byzantine clients; none if not given"
    )
    attack_target: Literal["updates", "statistics", "both"] = Field(
        default="both", description="corrupts updates, statistics or both"
    )
    byzantine: int = Field(
        default=0,
        ge=0,
        description="number of Byzantine clients; robust rules tolerate this number",
    )
    aggregator: str = Field(
        default="mean", description="how updates are combined; e.g. 'nnm > trimmed_mean'"
    )
    statistics_aggregator: str = Field(
        default="mean", description="how statistics are combined; e.g. 'nnm > median'"
    )
    client_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="probability that a client drops out of a round"
    )
    min_replies: int = Field(
        default=1,
        ge=1,
        description="usable replies that a round needs; with fewer, other clients repeat it",
    )
    max_examples: int | None = _count(
        None,
        "most examples that a client may claim; those of its part of the data if not given, and "
        "with engine 'flower' those of its first reply",
    )
    outlier_factor: float = Field(
        default=10_000.0,
        ge=0,
        description="how many times the median over clients a reply's update may be, and a tenth "
        "of it statistics, where they are averaged; 0 accepts everything",
    )
    rollback: bool = Field(
        default=False,
        description="undo a round after which the median of the clients' losses explodes, and "
        "repeat it without the replies that cause it",
    )
    secure: bool = Field(
        default=False,
        description="clients' replies are added up as integers, as under secure aggregation: the "
        "server uses sums alone",
    )
    privacy: PrivacySpec | None = Field(
        default=None, description="differential privacy at client level: a table; see docs/privacy"
    )
    client_state_memory: float = Field(
        default=4.0,
        ge=0,
        le=_MOST,
        description="GB of memory for client states; those beyond it are kept in files, in the "
        "folder that TMPDIR names",
    )
    callbacks: Annotated[list[Spec], BeforeValidator(parse_callbacks)] = Field(
        default=[], description="followers of the runs, such as early_stopping(patience=5)"
    )
    engine: Literal["auto", "loop", "merged", "stacked", "barrier", "processes", "flower"] = Field(
        default="auto",
        description="how rounds are executed; 'loop' trains client after client, 'merged' all in "
        "one pass, 'stacked' "
        "several in one wide model, 'barrier' in one thread each, synchronized at every exchange "
        "(fedtan), 'processes' on all cores, 'flower' on Flower's nodes; 'auto' takes the fastest "
        "that is exact, and an engine that would not be exact is refused",
    )
    timeout: float = Field(
        default=600.0,
        gt=0,
        le=_MOST,
        description="seconds that engine 'flower' waits for a client's answer, and after which a "
        "worker process that computes nothing is replaced",
    )
    diagnose: bool = Field(
        default=False,
        description="record drift, statistics and cost of each round; also deviation and variance "
        "of statistics, and gradient error (with the same dropout masks as the reference); trains "
        "client after client",
    )
    device: Annotated[str, AfterValidator(choose_device)] = Field(
        default="cpu", description="cpu, cuda, cuda:1, or auto: a GPU if any"
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=_MOST_THREADS,
        description="CPU threads of each run; results are bit-identical for the same number",
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="number format")
    precision: Literal["full", "bf16"] = Field(
        default="full",
        description="'bf16' trains with products in bfloat16, faster on processors that have them; "
        "weights, statistics and evaluation do not change",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_rates(self._plain_algorithm, self.dtype)
        self.plan  # noqa: B018 (each of these raises an error that says what is wrong)
        self.make_algorithm()
        self.partition_rule  # noqa: B018 (as above)
        known: tuple[tuple[Registry[Any], Spec], ...] = (DATASETS, self.data), (MODELS, self.model)
        for registry, chosen in known:
            if registry.has_own(chosen.name):
                create_entry(registry, chosen.name, chosen.fields)
            elif ":" not in chosen.name:
                registry.locate(chosen.name)  # your own is called when the run is built
        check_objective(self)
        check_callbacks(self)
        check_threats(self)
        for entry in self.strategies:
            strategy, own = self.make_strategy(entry), self.for_entry(entry)
            check_tuning(self, own, entry.title)
            if own.secure:
                check_sums(own, entry.title, strategy)
        check_strategy_fields(self)
        names = [entry.folder.casefold() for entry in self.strategies]
        if repeated := [e.title for e in self.strategies if names.count(e.folder.casefold()) > 1]:
            raise ValueError(
                f"strategy {repeated[0]!r} is listed twice; give each its own label, "
                'for example {name = "fixbn", freeze_round = "auto", label = "fixbn auto"}.'
            )
        if self.precision == "bf16" and self.dtype != "float32":
            raise ValueError("precision 'bf16' needs dtype 'float32'; leave one of them out.")
        if min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different and not negative, but are {self.seeds}.")
        if max(self.seeds) >= _SEEDS:
            raise ValueError(f"a seed is below 2^63, unlike {max(self.seeds)}.")
        return self

    def for_entry(self, entry: StrategySpec) -> "Experiment":
        """Return the experiment as one entry runs it, with the keys that it sets for itself.

        Without Byzantine clients there is no attack. The reference on one machine has no clients
        that could be Byzantine or drop out: it is what honest clients would reach.
        """
        own = {name: self._check_setting(name, v) for name, v in entry.settings.items()}
        if entry.centralized:
            own |= {key: Experiment.model_fields[key].default for key in THREATS}
        if all(getattr(self, name) == value for name, value in own.items()):
            return self
        key = entry.model_dump_json()
        if key not in self._variants:
            self._variants[key] = self._make_variant(entry, own)
        return self._variants[key]

    def _check_setting(self, key: str, value: Any) -> Any:
        """Return the value of a key that an entry sets; a table without a name changes fields."""
        held = getattr(self, key)
        if isinstance(held, Spec) and isinstance(value, Mapping) and "name" not in value:
            value = merge_tables(held.model_dump(), value)
        try:
            return _adapt_setting(key).validate_python(value)
        except ValidationError as error:
            raise ValueError(describe_setting(key, value, error)) from None

    def _make_variant(self, entry: StrategySpec, own: dict[str, Any]) -> "Experiment":
        if not own.get("byzantine", self.byzantine):
            own = {**own, "attack": None}
        alone = StrategySpec(name=entry.name, label=entry.label, **entry.fields)
        common = {k: v for k, v in self.strategy.items() if k in entry.known_fields}
        changes = {**own, "strategy": common, "strategies": [alone], "tune": {}}
        try:
            return Experiment.model_validate({**self.model_dump(), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(
                f"{entry.title}: {first.get('ctx', {}).get('error', first['msg'])}"
            ) from None

    @property
    def plan(self) -> "Plan":
        """How much a client trains in a round."""
        from fednorm.data.sampling import Plan  # noqa: PLC0415 (needs torch)

        algorithm = ALGORITHMS.find(self.algorithm.name)
        if algorithm.single_step and (self.local_epochs or (self.local_steps or 1) > 1):
            raise ValueError(
                f"algorithm {self.algorithm.name!r} takes one step per round, but "
                f"local_steps = {self.local_steps} and local_epochs = {self.local_epochs}; "
                "use 'fedavg' for more."
            )
        steps = None if self.local_epochs and not self.local_steps else self.local_steps or 1
        return Plan(self.batch_size, steps=steps, epochs=self.local_epochs)

    @property
    def evaluation_rounds(self) -> int:
        """Rounds between evaluations."""
        return self.eval_every or max(1, self.rounds // 60)

    # Texts and tables are parsed once; an experiment never changes.

    @cached_property
    def partition_rule(self) -> "Partition":
        """How data is divided among clients."""
        return create_partition(self.partition)

    @cached_property
    def aggregators(self) -> "tuple[Aggregator, Aggregator]":
        """The aggregators of updates and of statistics."""
        f = self.byzantine
        return create_aggregator(self.aggregator, f), create_aggregator(
            self.statistics_aggregator, f
        )

    @cached_property
    def attack_rule(self) -> "Attack | None":
        """What Byzantine clients do, if there is an attack."""
        return create_entry(ATTACKS, self.attack.name, self.attack.fields) if self.attack else None

    @cached_property
    def _plain_algorithm(self) -> "FedAvg | DSGD":
        return create_entry(ALGORITHMS, self.algorithm.name, self.algorithm.fields)

    @cached_property
    def _strategies(self) -> "dict[str, Strategy]":
        return {}

    @cached_property
    def _variants(self) -> "dict[str, Experiment]":
        return {}

    def make_algorithm(self, strategy: "Strategy | None" = None) -> "Algorithm":
        """Return the training algorithm; a strategy's warm-up counts unless the user sets one."""
        made = self._plain_algorithm
        if strategy is None or getattr(made, "warmup", 0) is not None:
            return made
        return dataclasses.replace(made, warmup=strategy.warmup)

    def make_strategy(self, entry: StrategySpec) -> "Strategy":
        """Return the strategy of an entry."""
        key = entry.model_dump_json()
        if key not in self._strategies:
            common = {k: None if v == "none" else v for k, v in self.strategy.items()}
            known = entry.known_fields
            fields = {k: v for k, v in common.items() if k in known} | entry.fields
            self._strategies[key] = create_entry(STRATEGIES, entry.strategy, fields)
        return self._strategies[key]


@cache
def _adapt_setting(key: str) -> TypeAdapter[Any]:
    info = Experiment.model_fields[key]
    kind: Any = info.annotation
    for limit in info.metadata:
        kind = Annotated[kind, limit]
    return TypeAdapter(kind)
