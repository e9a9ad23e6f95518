"""Checks of an experiment as a whole: keys that do not fit together are refused with the reason."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fednorm.aggregators import check_client_count
from fednorm.experiment.callbacks import CALLBACKS
from fednorm.experiment.schema.specs import create_entry
from fednorm.names import list_plugins, unknown

if TYPE_CHECKING:  # which needs torch
    from fednorm.core.strategy import Strategy

_LARGEST_RATE = 1e30
_DIVISORS = {"server_tau", "alpha"}


def check_threats(experiment: Any) -> None:
    """Raise ValueError if clients, aggregators and attack do not fit together."""
    from fednorm.data.sampling import count_participants  # noqa: PLC0415 (needs torch)

    trained, f = experiment.clients - experiment.unseen_clients, experiment.byzantine
    if f and 2 * f >= trained:
        raise ValueError(
            f"fewer than half of the {trained} clients can be Byzantine, but byzantine = {f}; "
            f"choose at most {(trained - 1) // 2}, or more clients."
        )
    taking_part = count_participants(trained, experiment.participation)
    keys = ("aggregator", "statistics_aggregator")
    for key, rule in zip(keys, experiment.aggregators, strict=True):
        try:
            check_client_count(rule, taking_part)
        except ValueError as error:
            raise ValueError(f"{key}, with {taking_part} clients in a round: {error}") from None
    if experiment.min_replies > taking_part:
        raise ValueError(
            f"min_replies = {experiment.min_replies}, but only {taking_part} clients take part in "
            "a round."
        )
    if experiment.privacy:
        experiment.privacy.check(experiment)
    if 0 < experiment.outlier_factor < 1:
        raise ValueError(
            "outlier_factor is 0 (all are accepted) or at least 1, not "
            f"{experiment.outlier_factor}."
        )
    experiment.attack_rule  # noqa: B018 (raises an error that says what is wrong)
    byzantine = any(entry.settings.get("byzantine") for entry in experiment.strategies)
    if experiment.attack and not f and not byzantine:
        raise ValueError(
            f"attack {experiment.attack.name!r} needs clients that make it; "
            "say how many with byzantine (--byzantine 3)."
        )


def check_objective(experiment: Any) -> None:
    """Raise ValueError for a loss or metric that is neither the user's nor a package's."""
    named = [("loss", experiment.loss)] if experiment.loss else []
    named += [("metric", spec) for spec in (experiment.metrics or {}).values()]
    for kind, spec in named:
        known = list_plugins(kind)
        if ":" not in spec.name and spec.name not in known:
            raise ValueError(
                f"a {kind} is 'package.module:function', such as "
                f"{'torch.nn:HuberLoss' if kind == 'loss' else 'mine:f1'}, or a name that an "
                f"installed package registers ({', '.join(known) or 'none does'}), not "
                f"{spec.name!r}."
            )


def check_callbacks(experiment: Any) -> None:
    """Raise an error for a callback that cannot be made; those of the user are not imported."""
    for callback in experiment.callbacks:
        if CALLBACKS.has_own(callback.name):
            create_entry(CALLBACKS, callback.name, callback.fields)
        elif ":" not in callback.name:
            CALLBACKS.locate(callback.name)


def check_strategy_fields(experiment: Any) -> None:
    """Raise an error for a field of the table `strategy` that no chosen strategy has."""
    known = {f for entry in experiment.strategies for f in entry.known_fields}
    for key in experiment.strategy:
        if key not in known:
            raise unknown("field of the chosen strategies", key, known)


def check_rates(algorithm: Any, dtype: str) -> None:
    """Refuse rates of an algorithm whose products `dtype` cannot hold."""
    largest = _LARGEST_RATE if dtype == "float32" else _LARGEST_RATE**8
    for key in ("lr", "weight_decay", "server_lr", "server_tau", "mu", "alpha"):
        value = getattr(algorithm, key, None) or 0.0
        if value > largest:
            raise ValueError(f"{key} is at most {largest:g} with dtype {dtype!r}, not {value}.")
        if key in _DIVISORS and 0 < value < 1 / largest:
            raise ValueError(
                f"{key} is at least {1 / largest:g} with dtype {dtype!r}, not {value}."
            )


def check_tuning(experiment: Any, own: Any, title: str) -> None:
    """Refuse to choose by clients' data what is to be private."""
    private = own.privacy or any(key.partition(".")[0] == "privacy" for key in experiment.tune)
    if experiment.tune and private:
        raise ValueError(
            f"tune does not go with the privacy of {title!r}: the values are chosen on data that "
            "clients train on in the end, which no ε counts; leave one of them out."
        )


def choose_device(name: str) -> str:
    """Return the device that "auto" means here; refuse what cannot train.

    >>> choose_device("gpu")
    Traceback (most recent call last):
    ValueError: device is 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu', not 'gpu'.
    """
    import torch  # noqa: PLC0415 (keys are listed without torch)

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d{1,3})?", name):
        raise ValueError(
            f"device is 'auto', 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu', not {name!r}."
        )
    return name


def check_sums(experiment: Any, title: str, strategy: "Strategy") -> None:
    """Refuse what an experiment needs of clients beyond sums, as `secure` leaves nothing else."""
    for needed, reason, remedy in (*_list_rules(experiment, strategy), *_list_keys(experiment)):
        if needed:
            raise ValueError(
                f"secure = true, with which the server of {title!r} uses sums over clients alone, "
                f"does not go with {reason}; {remedy}."
            )


def _list_rules(experiment: Any, strategy: "Strategy") -> Iterator[tuple[bool, str, str]]:
    """Yield rules that may need single replies: whether they do, why, and what to do."""
    from fednorm.attacks.simple import NonFinite  # noqa: PLC0415 (needs torch)

    other = "choose another strategy, or secure = false"
    yield strategy.exchanges, "exchanges of batches' statistics within a round", other
    yield not strategy.merges_sums, "weights that depend on each client's statistics", other
    keys = ("aggregator", "statistics_aggregator")
    for key, rule in zip(keys, experiment.aggregators, strict=True):
        said = f"{key} = {getattr(experiment, key)!r}, which compares replies"
        yield not rule.uses_weights, said, "choose 'mean'"
    broken = isinstance(experiment.attack_rule, NonFinite)
    yield broken, "attack 'non_finite': integers are finite", "choose another attack"


def _list_keys(experiment: Any) -> Iterator[tuple[bool, str, str]]:
    """Yield keys that may need single replies, as above."""
    from fednorm.data.sampling import count_participants  # noqa: PLC0415 (needs torch)

    for key in ("rollback", "max_examples", "diagnose"):
        text = f"{key} = {str(getattr(experiment, key)).lower()}, which looks at single replies"
        yield bool(getattr(experiment, key)), text, "leave one of them out"
    clipped = experiment.privacy is not None
    yield clipped, "a table [privacy], as the server clips single replies", "leave one of them out"
    single = experiment.evaluate == "clients"
    yield single, "evaluate = 'clients', which shows a result of each", "choose 'auto'"
    nodes = "engine 'flower', whose secure aggregation is for apps of an older interface"
    yield experiment.engine == "flower", nodes, "choose another engine"
    trained = experiment.clients - experiment.unseen_clients
    alone = count_participants(trained, experiment.participation) == 1
    yield alone, "one client in a round, whose reply the sum would be", "let more take part"
