"""Describe the setting of an experiment in words: "10 clients, one digit each; mlp on digits"."""

from collections.abc import Mapping, Sequence
from typing import Any

from fednorm.report.format import format_toml

_WORDS = {  # partitions by name; {} is the value after "="
    "iid": "dealt at random",
    "natural": "each with the data of its own source",
    "dirichlet": "class mixes of a Dirichlet distribution (α = {})",
    "gamma": "sorted by label but for a share of {}",
}
_SORTED = "sorted by label"
_NOUNS = {"digits": "digit", "mnist": "digit"}  # what a class of the data set is
_MOSTLY = 0.9  # share of its samples that a client's classes hold


def describe_setting(config: Mapping[str, Any], counts: Sequence[Sequence[int]] = ()) -> str:
    """Describe clients and their data, network, training and faults in one line.

    `counts` has the training samples of each client by label, if they are known. What the config
    does not name is left out.

    >>> config = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "partition": "gamma=0"}
    >>> describe_setting({**config, "clients": 2}, [[9, 0, 0], [0, 8, 0]])
    '2 clients, one digit each; mlp on digits'
    >>> describe_setting({**config, "clients": 2, "rounds": 600, "participation": 0.5})
    '2 clients, sorted by label, 50 % of them per round; mlp on digits; 600 rounds'
    """
    parts = (
        ", ".join(_describe_clients(config, counts)),
        " on ".join(_describe_choice(config[key]) for key in ("model", "data") if config.get(key)),
        ", ".join(_describe_training(config)),
        ", ".join(_describe_faults(config)),
    )
    return "; ".join(part for part in parts if part)


def _describe_clients(config: Mapping[str, Any], counts: Sequence[Sequence[int]]) -> list[str]:
    number, participation = config.get("clients"), config.get("participation", 1.0)
    listed = [] if number is None else [f"{number} client{'' if number == 1 else 's'}"]
    listed += [_describe_classes(counts, _find_noun(config)) or _describe_partition(config)]
    if participation != 1.0:
        listed += [f"{100 * participation:.3g} % of them per round"]
    return [part for part in listed if part]


def _find_noun(config: Mapping[str, Any]) -> str:
    return _NOUNS.get(_find_name(config.get("data", "")), "class")


def _describe_classes(counts: Sequence[Sequence[int]], noun: str) -> str:
    """Say how many classes a client mostly has; nothing where one has nearly all of them."""
    held = [_count_classes(row) for row in counts]
    if not held or max(held) > _MOSTLY * len(counts[0]):
        return ""
    mostly = any(sum(sample > 0 for sample in row) > n for row, n in zip(counts, held, strict=True))
    least, most = min(held), max(held)
    number = "one" if most == 1 else f"{least}" if least == most else f"{least} to {most}"
    of = "" if most == 1 else f" of {len(counts[0])}"
    plural = {"class": "classes"}.get(noun, f"{noun}s")
    return f"{'mostly ' if mostly else ''}{number}{of} {noun if most == 1 else plural} each"


def _count_classes(row: Sequence[int]) -> int:
    """Return the smallest number of classes that hold nearly all samples of a client."""
    held, number = 0, 0
    for samples in sorted(row, reverse=True):
        if held >= _MOSTLY * sum(row):
            break
        held, number = held + samples, number + 1
    return number


def _describe_partition(config: Mapping[str, Any]) -> str:
    found = config.get("partition")
    if not isinstance(found, str):
        return _describe_choice(found) if found else ""
    name, _, value = found.partition("=")
    if name == "gamma" and float(value or 1) == 0:
        return _SORTED
    return _WORDS.get(name, found).format(value)


def _describe_training(config: Mapping[str, Any]) -> list[str]:
    rounds, algorithm = config.get("rounds"), config.get("algorithm")
    listed = []
    if rounds:
        of = f" of {_describe_choice(algorithm)}" if algorithm else ""
        listed.append(f"{rounds} round{'' if rounds == 1 else 's'}{of}")
    for key, unit in (("local_steps", "local step"), ("local_epochs", "local epoch")):
        if number := config.get(key):
            listed.append(f"{number} {unit}{'' if number == 1 else 's'} per round")
    return listed


def _describe_faults(config: Mapping[str, Any]) -> list[str]:
    listed = []
    if byzantine := config.get("byzantine"):
        attack = f" ({_describe_choice(config['attack'])})" if config.get("attack") else ""
        listed.append(f"{byzantine} Byzantine client{'' if byzantine == 1 else 's'}{attack}")
    if dropout := config.get("client_dropout"):
        listed.append(f"{100 * dropout:.3g} % of replies lost")
    if config.get("privacy"):
        listed.append("differential privacy")
    return listed


def _find_name(value: Any) -> str:
    return str(value.get("name", "")) if isinstance(value, Mapping) else str(value)


def _describe_choice(value: Any) -> str:
    """Write a name with its plain fields.

    >>> _describe_choice({"name": "dsgd", "lr": 0.05, "schedule": "", "steps": [1]})
    'dsgd (lr 0.05)'
    """
    if not isinstance(value, Mapping):
        return str(value)
    plain = {k: v for k, v in value.items() if isinstance(v, str | int | float) and v != ""}
    words = (v if isinstance(v, str) else format_toml(v) for k, v in plain.items() if k != "name")
    keys = (k for k in plain if k != "name")
    details = ", ".join(f"{key} {word}" for key, word in zip(keys, words, strict=True))
    return _find_name(value) + (f" ({details})" if details else "")
