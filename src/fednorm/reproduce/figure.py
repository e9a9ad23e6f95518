"""A table or figure with panels, published or your own: its file, and the scales of its runs.

The smallest scale takes a minute: two tiny rounds on small synthetic images with as many channels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fednorm.data.partition import rename_partition
from fednorm.errors import ConfigError
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, override_settings, read_toml
from fednorm.experiment.schema.specs import merge_tables
from fednorm.names import unknown
from fednorm.report.format import flatten


class PanelSpec(BaseModel):
    """One part of a figure, or one column of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(description="such as 'γ = 0'")
    set: dict[str, Any] = Field(default={}, description="what differs from [experiment]")
    short: dict[str, Any] = Field(default={}, description="further changes of the short scale")
    published: dict[str, float] = Field(default={}, description="per cent, by label")
    published_std: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="standard deviations of published means, in points, by label"
    )
    published_exchanges: dict[str, float] = Field(
        default={}, description="exchanges a round, by label"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if alone := sorted(set(self.published_std) - set(self.published)):
            raise ValueError(
                f"{alone[0]!r} has a published standard deviation but no published mean; give "
                "both, under the same label"
            )
        return self


class Figure(BaseModel):
    """A table or figure; `experiment` is the setting of all panels, the paper's if published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = ""
    question: str = ""
    source: str = Field(default="", description="the paper; none for panels of your own")
    note: str = Field(default="", description="what had to be assumed")
    finals: str = Field(default="", description="axis of a plot of final values by panel")
    curves: list[str] | None = Field(default=None, description="panels whose curves are drawn")
    heat: tuple[str, str] | None = Field(
        default=None, description="two labels whose difference is drawn as heat maps"
    )
    best: bool = Field(default=False, description="published numbers are the best of a run")
    ring: dict[str, int] | None = Field(default=None, description="drawn by `fednorm ring`")
    experiment: dict[str, Any] = {}
    short: dict[str, Any] = {}
    panels: list[PanelSpec] = []


def find_configs() -> Path:
    """Return the folder of the files: in the package, or next to its source."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def list_figures() -> dict[str, Figure]:
    """Return every published table and figure by name."""
    # Other experiments in the same folder have no source.
    found = {
        path.stem: read_toml(path)
        for path in sorted(find_configs().glob("*.toml"), key=_make_sort_key)
    }
    return {name: _validate(name, values) for name, values in found.items() if "source" in values}


def find_figure(name: str) -> Figure:
    """Return the figure with that name, or the one in a TOML file."""
    if name.endswith(".toml"):
        return _validate(name, read_toml(Path(name)))
    known = list_figures()
    if name not in known:
        raise unknown("table or figure", name, known)
    return known[name]


def _validate(name: str, values: dict[str, Any]) -> Figure:
    try:
        return Figure.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        ours = first["type"] == "value_error"
        said = str(first["ctx"]["error"]) if ours else first["msg"].lower()
        raise ConfigError(f"{name}: {where}: {said}.") from None


def _make_sort_key(path: Path) -> tuple[str, int, str]:
    """Sort fig2 before fig10."""
    word = path.stem.rstrip("0123456789")
    return word, int(path.stem[len(word) :] or 0), path.stem


Scale: TypeAlias = Literal["full", "short", "smoke"]
SCALES: dict[Scale, str] = {
    "full": "the paper's setting",
    "short": "the same data set, network, clients and partition for fewer rounds",
    "smoke": "a minute on synthetic data, to check that it runs",
}

# Keys that say how often a run is evaluated, and where it runs.
_HARMLESS = {
    "eval_every",
    "diagnose",
    "device",
    "threads",
    "engine",
    "data.root",
    "client_state_memory",
}
_COUNTS = {"data.train", "data.test"}  # None means all

_GRAY = ("mnist", "fashion_mnist", "femnist", "patterns")  # all other data sets have colors
_SIZE = 16  # pixels; every network takes them
_CLASSES, _CLIENTS, _SAMPLES, _BATCH, _STEPS = 10, 5, 12, 4, 2


def scale_figure(
    figure: Figure, scale: Scale, settings: Sequence[str] = (), titles: Sequence[str] = ()
) -> list[tuple[PanelSpec, Experiment]]:
    """Return the experiment of every panel at a scale, with `key=value` settings of the user.

    A partition that is named without its value keeps the value that each panel has. `titles` are
    those of the panels that are wanted; empty: those of the scale.
    """
    panels = _keep_panels(figure, scale, titles)
    before = [_collect_values(figure, panel, scale) for panel in panels]
    after = [override_settings(values, settings) for values in before]
    chosen = _choose_partitions([_find_partition(values) for values in before], after)
    return [
        (panel, build_experiment({**values, "partition": partition}))
        for panel, values, partition in zip(panels, after, chosen, strict=True)
    ]


def _find_partition(values: Mapping[str, Any]) -> str:
    return str(values.get("partition", Experiment.model_fields["partition"].default))


def _choose_partitions(before: Sequence[str], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the partition of every panel.

    A partition with another parameter than the user's is kept, such as γ = 0 among values of α; if
    all are, the name alone is left, and building it reports the missing value.
    """
    names = [_find_partition(values) for values in after]
    renamed = [rename_partition(old, new) for old, new in zip(before, names, strict=True)]
    if not any(renamed):
        return names
    return [new or old for old, new in zip(before, renamed, strict=True)]


def _collect_values(figure: Figure, panel: PanelSpec, scale: Scale) -> dict[str, Any]:
    values = merge_tables(figure.experiment, panel.set)
    if scale == "full":
        return values
    if scale == "smoke":
        return _shrink(values)
    short = {key: value for key, value in figure.short.items() if key != "panels"}
    return merge_tables(merge_tables(values, short), panel.short)


def _shrink(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment with the same network, strategies and kind of partition."""
    clients = min(values.get("clients", 10), _CLIENTS)
    small = {
        "data": _make_stand_in(values.get("data", "digits"), clients),
        "clients": clients,
        "rounds": 2,
        "batch_size": _BATCH,
        "seeds": [0],
        "eval_every": 2,
        "participation": max(values.get("participation", 1.0), 2 / clients),
    }
    full = values.get("clients", _CLIENTS)
    if "byzantine" in values:
        small["byzantine"] = _scale_byzantine(values["byzantine"], full, clients)
    if isinstance(values.get("strategies"), list):
        small["strategies"] = [
            {**entry, "byzantine": _scale_byzantine(entry["byzantine"], full, clients)}
            if isinstance(entry, Mapping) and "byzantine" in entry
            else entry
            for entry in values["strategies"]
        ]
    if "local_steps" in values:
        small["local_steps"] = min(values["local_steps"], _STEPS)
    if "local_epochs" in values:
        small["local_epochs"] = 1
    return {**values, **small}


def _scale_byzantine(byzantine: int, full: int, clients: int) -> int:
    """Return about the same share of fewer clients, and less than half of them."""
    return min(round(byzantine * clients / full), (clients - 1) // 2)


def _make_stand_in(data: Mapping[str, Any] | str, clients: int) -> dict[str, Any] | str:
    name = str(data if isinstance(data, str) else data["name"])
    if name in ("digits", "ring"):
        return name
    if name == "cityscapes":
        return {"name": "scenes", "samples": _SAMPLES * clients, "test": 8, "cities": clients}
    return {
        "name": "patterns",
        "channels": 1 if name in _GRAY else 3,
        "size": _SIZE,
        "classes": _CLASSES,
        "samples": _SAMPLES * clients,
        "test": 40,
    }


def _keep_panels(figure: Figure, scale: Scale, titles: Sequence[str] = ()) -> list[PanelSpec]:
    known = [panel.title for panel in figure.panels]
    kept = titles or (figure.short.get("panels") if scale == "short" else None)
    if kept is not None:
        if missing := [title for title in kept if title not in known]:
            raise unknown("panel", missing[0], known)
        return [panel for panel in figure.panels if panel.title in kept]
    if scale == "smoke":
        return figure.panels[:1] + figure.panels[1:][-1:]
    return figure.panels


def describe_cuts(
    figure: Figure, scale: Scale, settings: Sequence[str] = (), titles: Sequence[str] = ()
) -> tuple[str, ...]:
    """Say in sentences how a run differs from the paper's setting."""
    notes = (figure.note.strip(),) if figure.note else ()
    kept = _keep_panels(figure, scale, titles)
    sentences: dict[str, list[str]] = {}
    for panel, cut in scale_figure(figure, scale, settings, titles):
        full = build_experiment(_collect_values(figure, panel, "full"))
        for sentence in _list_differences(full, cut):
            sentences.setdefault(sentence, []).append(panel.title)
    said = [
        sentence if len(where) == len(kept) else f"{', '.join(where)}: {sentence}"
        for sentence, where in sentences.items()
    ]
    dropped = [panel.title for panel in figure.panels if panel not in kept]
    left_out = [f"Left out: {', '.join(dropped)}."] if dropped else []
    return (*said, *left_out, *notes)


def _list_differences(full: Experiment, cut: Experiment) -> list[str]:
    before, after = (
        {key.removesuffix(".name"): value for key, value in flatten(one.model_dump()).items()}
        for one in (full, cut)
    )
    kept = {entry.title for entry in cut.strategies}
    lost = [entry.title for entry in full.strategies if entry.title not in kept]
    listed = [f"Without {', '.join(lost)}."] if lost else []
    changed = [
        f"{key} = {_format(key, after.get(key))} instead of {_format(key, before.get(key))}."
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in _HARMLESS and key != "strategies"
    ]
    return listed + changed


def _format(key: str, value: Any) -> str:
    if value is None:
        return "all" if key in _COUNTS else "the default"
    return str(value)
