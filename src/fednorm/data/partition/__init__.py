"""Partitions: divide samples among clients."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fednorm.errors import ConfigError
from fednorm.registry import Registry, export_lazily, parse_call, split_outside

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fednorm.data.partition.base import Indices, Partition

__all__ = [
    "PARTITIONS",
    "Partition",
    "create_partition",
    "list_partitions",
    "partition",
    "rename_partition",
]

PARTITIONS: "Registry[Partition]" = Registry(
    "partition",
    __name__,
    {
        "iid": "label_skew:Iid",
        "gamma": "label_skew:Gamma",
        "dirichlet": "label_skew:Dirichlet",
        "dirichlet_unbalanced": "label_skew:DirichletUnbalanced",
        "shards": "label_skew:Shards",
        "natural": "label_skew:Natural",
        "feature_shift": "feature_shift:FeatureShift",
    },
    "fednorm.data.partition.base:Partition",
)

__getattr__ = export_lazily(__name__, {"fednorm.data.partition.base": "Partition"})


def partition(
    rule: "str | Partition",
    labels: "Tensor | Sequence[int] | NDArray[Any]",
    *,
    clients: int,
    seed: int,
    groups: "Sequence[Any] | NDArray[Any] | None" = None,
    **fields: Any,
) -> "list[Indices]":
    """Divide samples among clients; return each client's indices.

    Args:
        rule: a partition, or text such as "gamma=0" that `create_partition` reads.
        labels: the class of every sample.
        clients: the number of clients.
        seed: the same seed gives the same partition everywhere.
        groups: the natural group of every sample, for "natural".
        fields: further settings of the partition, such as `min_samples=10`.

    >>> [part.tolist() for part in partition("gamma=0", [1, 0, 1, 0], clients=2, seed=0)]
    [[1, 3], [0, 2]]
    """
    import numpy as np  # noqa: PLC0415 (names are listed without numpy and torch)

    from fednorm.core.random_streams import Stream, make_rng  # noqa: PLC0415 (as above)
    from fednorm.data.partition.base import check_parts, check_request, to_labels  # noqa: PLC0415

    name = rule if isinstance(rule, str) else PARTITIONS.name_of(type(rule)) or repr(rule)
    chosen = create_partition(rule, **fields) if isinstance(rule, str) else rule
    array = to_labels(labels)
    members = None if groups is None else np.asarray(groups)
    check_request(name, len(array), clients, members)
    parts = chosen.split(array, clients, make_rng(seed, Stream.PARTITION), members)
    check_parts(name, parts, len(array))
    return parts


def create_partition(text: str, **fields: Any) -> "Partition":
    """Create the partition that `text` names, such as "dirichlet=0.1".

    `fields` are further settings, which may stand in brackets as well: "dirichlet(alpha=0.1)".
    "A + feature_shift=…" deals labels by A and shifts features. Your own class is "module:Class".

    >>> create_partition("gamma=0.5")
    Gamma(gamma=0.5)
    >>> create_partition("feature_shift=noise", strength=2.0)
    FeatureShift(kind='noise', strength=2.0, labels='iid')
    >>> create_partition("dirichlet=0.3 + feature_shift=noise").labels
    'dirichlet=0.3'
    """
    *before, text = split_outside(text, " + ")
    if before:
        fields = {"labels": " + ".join(before).strip(), **fields}
    name, equals, value = _read_value(text)
    called = parse_call(name)
    if called:
        name, fields = called[0], {**called[1], **fields}
    cls = PARTITIONS.find(name)
    declared = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # as below
    if before and "labels" not in declared:
        raise ConfigError(
            f"after '+' comes a partition that changes features, not {name!r}; "
            "write for example 'dirichlet=0.3 + feature_shift=contrast'."
        )
    argument = cls.argument
    if equals and argument is None:
        raise ConfigError(f"partition {name!r} takes no value, but got {text!r}; write {name!r}.")
    if equals and argument in fields:
        raise ConfigError(
            f"partition {name!r} got {argument} twice: {value!r} in {text!r} and "
            f"{fields[argument]!r} as a field; give it once."
        )
    if argument is not None and argument not in fields:
        fields |= _read_field(name, argument, value if equals else None)
    return PARTITIONS.create(name, fields)


def list_partitions() -> list[str]:
    """Return the names of all partitions, sorted.

    >>> list_partitions()[:3]
    ['dirichlet', 'dirichlet_unbalanced', 'feature_shift']
    """
    return sorted(PARTITIONS.list_names())


def rename_partition(text: str, name: str) -> str | None:
    """Replace the partition's name in `text`; a `name` without a value keeps that of `text`.

    Return None if the new partition needs a value that `text` does not have.

    >>> rename_partition("dirichlet=0.1", "dirichlet_unbalanced")
    'dirichlet_unbalanced=0.1'
    >>> rename_partition("gamma=0.1", "gamma=0")
    'gamma=0'
    >>> rename_partition("dirichlet=0.1", "gamma") is None
    True
    """
    # An unknown name, or one with its value, is for `create_partition`.
    wanted, equals, _ = _read_value(name)
    new = None if equals else PARTITIONS.get(wanted)
    if new is None or new.argument is None or _find_field(new).default is not dataclasses.MISSING:
        return name
    before, _, value = _read_value(text)
    old = PARTITIONS.get(before)
    same = old is not None and old.argument == new.argument and value
    return f"{name.strip()}={value}" if same else None


def _read_value(text: str) -> tuple[str, str, str]:
    """Split "gamma=0" where the value begins; fields in brackets belong to the name."""
    name, *rest = split_outside(text, "=")
    return name.strip(), "=" if rest else "", "=".join(rest).strip()


def _find_field(rule: "type[Partition]") -> dataclasses.Field[Any]:
    """Return the field that the text after "=" sets."""
    declared = dataclasses.fields(rule)  # type: ignore[arg-type]  # every one is a dataclass
    (field,) = (f for f in declared if f.name == rule.argument)
    return field


def _read_field(name: str, argument: str, value: str | None) -> dict[str, Any]:
    """Return the field that the text sets; empty if it needs no value and has none."""
    field = _find_field(PARTITIONS.find(name))
    if value is None and field.default is not dataclasses.MISSING:
        return {}
    if value is not None and field.type in (str, "str"):
        return {argument: value}
    try:
        return {argument: int(value or "") if field.type in (int, "int") else float(value or "")}
    except ValueError:
        raise ConfigError(
            f"partition {name!r} needs a number for {argument}, but got "
            f"{'none' if value is None else repr(value)}; write for example '{name}=0.5'."
        ) from None
