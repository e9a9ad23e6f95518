"""The three scales at which a figure is run, and what each of them cuts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fednorm.data.partition import rename
from fednorm.experiment.config import Experiment
from fednorm.experiment.load import ConfigError, build, override
from fednorm.reproduce.figure import Figure, PanelSpec
from fednorm.reproduce.smoke import smoke

Scale: TypeAlias = Literal["full", "short", "smoke"]
SCALES: dict[Scale, str] = {
    "full": "the paper's setting",
    "short": "the same data set, network, clients and partition for fewer rounds",
    "smoke": "a minute on made-up data, to see that it runs",
}


# How often a run is looked at, and where it runs.
_HARMLESS = {
    "eval_every",
    "diagnose",
    "device",
    "threads",
    "engine",
    "data.root",
    "personal_memory",
}
_COUNTS = {"data.train", "data.test"}  # of which none means all


def scaled(
    figure: Figure, scale: Scale, settings: Sequence[str] = ()
) -> list[tuple[PanelSpec, Experiment]]:
    """Return the experiment of every panel at a scale, with `key=value` settings of a user's.

    A partition that is named without its value keeps the value that each panel has.
    """
    panels = _kept(figure, scale)
    before = [_values(figure, panel, scale) for panel in panels]
    after = [override(values, settings) for values in before]
    chosen = _partitions([_partition(values) for values in before], after)
    return [
        (panel, build({**values, "partition": partition}))
        for panel, values, partition in zip(panels, after, chosen, strict=True)
    ]


def _partition(values: Mapping[str, Any]) -> str:
    return str(values.get("partition", Experiment.model_fields["partition"].default))


def _partitions(before: Sequence[str], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the partition of every panel.

    One that takes another value than the user's stays as it is, such as γ = 0 among values of α;
    if all do, the name alone is left, of which `build` says what it needs.
    """
    names = [_partition(values) for values in after]
    renamed = [rename(old, new) for old, new in zip(before, names, strict=True)]
    if not any(renamed):
        return names
    return [new or old for old, new in zip(before, renamed, strict=True)]


def _values(figure: Figure, panel: PanelSpec, scale: Scale) -> dict[str, Any]:
    values = merged(figure.experiment, panel.set)
    if scale == "full":
        return values
    if scale == "smoke":
        return smoke(values)
    short = {key: value for key, value in figure.short.items() if key != "panels"}
    return merged(merged(values, short), panel.short)


def _kept(figure: Figure, scale: Scale) -> list[PanelSpec]:
    kept = figure.short.get("panels")
    if scale == "short" and kept is not None:
        titles = {panel.title for panel in figure.panels}
        if missing := [title for title in kept if title not in titles]:
            raise ConfigError(f"{figure.title} has no panel {missing[0]!r} to keep.")
        return [panel for panel in figure.panels if panel.title in kept]
    if scale == "smoke":
        return figure.panels[:1] + figure.panels[1:][-1:]
    return figure.panels


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with changes; tables are merged key by key, a name is a table.

    >>> merged({"data": "digits", "rounds": 9}, {"data": {"test": 10}})
    {'data': {'name': 'digits', 'test': 10}, 'rounds': 9}
    """
    result = dict(values)
    for key, new in changes.items():
        old = result.get(key)
        table = {"name": old} if isinstance(old, str) else old
        both = isinstance(table, Mapping) and isinstance(new, Mapping)
        result[key] = merged(table, new) if both else new  # type: ignore[arg-type]  # both are tables
    return result


def cuts(figure: Figure, scale: Scale, settings: Sequence[str] = ()) -> tuple[str, ...]:
    """Say in sentences how a run differs from the paper's setting."""
    notes = (figure.note.strip(),) if figure.note else ()
    kept = _kept(figure, scale)
    sentences: dict[str, list[str]] = {}
    for panel, cut in scaled(figure, scale, settings):
        full = build(_values(figure, panel, "full"))
        for sentence in _differences(full, cut):
            sentences.setdefault(sentence, []).append(panel.title)
    said = [
        sentence if len(where) == len(kept) else f"{', '.join(where)}: {sentence}"
        for sentence, where in sentences.items()
    ]
    dropped = [panel.title for panel in figure.panels if panel not in kept]
    left_out = [f"Left out: {', '.join(dropped)}."] if dropped else []
    return (*said, *left_out, *notes)


def _differences(full: Experiment, cut: Experiment) -> list[str]:
    before, after = _flat(full.model_dump()), _flat(cut.model_dump())
    kept = {entry.title for entry in cut.strategies}
    lost = [entry.title for entry in full.strategies if entry.title not in kept]
    listed = [f"Without {', '.join(lost)}."] if lost else []
    changed = [
        f"{key} = {_word(key, after.get(key))} instead of {_word(key, before.get(key))}."
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in _HARMLESS
    ]
    return listed + changed


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key != "strategies":
            flat[f"{prefix}{key}".removesuffix(".name")] = value
    return flat


def _word(key: str, value: Any) -> str:
    if value is None:
        return "all" if key in _COUNTS else "the default"
    return str(value)
