"""Read the folders of experiments and figures, and join several into one figure.

Experiments that differ in nothing but strategies and seeds become one panel; others become panels
of one page, each named after the settings in which it differs. Nothing is trained or tested again.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat

from fednorm.errors import ConfigError
from fednorm.experiment.comparison import load_comparison
from fednorm.experiment.results import Comparison, FigureResult, PanelResult, RunResult
from fednorm.experiment.run_folder import name_folder, read_json
from fednorm.experiment.schema.specs import OWN_SETTINGS
from fednorm.report.format import flatten, format_toml, list_names
from fednorm.report.write import QUESTION, wrap_comparison

_NOT_SETTINGS = ("strategies", "seeds", "client_state_memory", "timeout", "tune", "validation")
_TOLD = ("partition", "name")  # by their values
_MOST_NAMED = 3  # settings in a title; panels that differ in more are named after their folders


@dataclass(frozen=True)
class _Part:
    """A comparison of a folder, to be joined with others."""

    folder: str  # its name
    comparison: Comparison

    @property
    def settings(self) -> dict[str, str]:
        """The settings that all its strategies share, as text, by dotted key."""
        config = {k: v for k, v in self.comparison.config.items() if k not in _NOT_SETTINGS}
        values = flatten(config)
        values.pop("data.root", None)  # where data lie changes nothing
        return {key: format_toml(value) for key, value in values.items()}


def load_figure(folder: Path) -> FigureResult:
    """Return what the folder of an experiment, or of a figure with panels, holds."""
    if (folder / "config.toml").exists():
        return _check_filled(wrap_comparison(load_comparison(folder)), folder)
    record = _read_figure(folder)
    panels = tuple(
        PanelResult(comparison=load_comparison(place), **panel.model_dump())
        for panel in record.panels
        if (place := folder / name_folder(panel.title)).is_dir()
    )
    figure = FigureResult(panels=panels, **record.model_dump(exclude={"panels"}))
    return _check_filled(figure, folder)


class _PanelRecord(BaseModel):
    """What results.json tells of a panel besides its runs."""

    title: str
    published: dict[str, FiniteFloat] = {}
    published_exchanges: dict[str, FiniteFloat] = {}
    published_std: dict[str, FiniteFloat] = {}
    best: bool = False


class _FigureRecord(BaseModel):
    """What results.json tells of a figure."""

    title: str = ""
    question: str = ""
    command: str = ""
    source: str = ""
    cuts: tuple[str, ...] = ()
    panels: tuple[_PanelRecord, ...]
    finals: str = ""
    curves: tuple[str, ...] | None = None
    heat: tuple[str, str] | None = None
    smoke: bool = False


def _read_figure(folder: Path) -> _FigureRecord:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}; name one that a command has made.")
    with suppress(OSError, ValueError):
        return _FigureRecord.model_validate(read_json(folder / "results.json"))
    above = next((p for p in folder.resolve().parents if (p / "config.toml").exists()), None)
    if above is not None and (folder / "run.json").exists():
        raise ConfigError(f"{str(folder)!r} holds one run; name its experiment, {str(above)!r}.")
    below = sorted(p.parent.name for p in folder.glob("*/config.toml") if not p.parent.is_symlink())
    hint = f"; there are experiments in its folders {list_names(below)}" if below else ""
    raise ConfigError(f"{str(folder)!r} holds no experiment, as it has no config.toml{hint}.")


def _check_filled(figure: FigureResult, folder: Path) -> FigureResult:
    if not any(panel.comparison.runs for panel in figure.panels):
        raise ConfigError(
            f"{str(folder)!r} holds no finished run of its config.toml by this version of fednorm; "
            f"`fednorm run {folder / 'config.toml'} --out {folder}` makes its runs."
        )
    return figure


def join_folders(folders: Sequence[Path], *, together: bool = False) -> FigureResult:
    """Return one figure of all folders; with `together`, all experiments share one panel."""
    figures = [load_figure(folder) for folder in folders]
    if len(figures) == 1:
        return figures[0]
    names = _name_apart([folder.resolve() for folder in folders])
    pairs = list(zip(names, figures, strict=True))
    parts = [_Part(name, f.panels[0].comparison) for name, f in pairs if _is_plain(f)]
    titled = [
        replace(panel, title=f"{figure.title or name}: {panel.title}")
        for name, figure in pairs
        if not _is_plain(figure)
        for panel in figure.panels
    ]
    joined, axis = ([_join_different(parts)], "") if together else _group_parts(parts)
    return FigureResult(
        title="" if len(joined) == 1 and not titled else " + ".join(names),
        question=QUESTION,
        command=f"fednorm report {' '.join(map(str, folders))}{' --together' * together}",
        panels=(*(joined if parts else ()), *titled),
        cuts=tuple(f"{f.title or name}: {cut}" for name, f in pairs for cut in f.cuts),
        smoke=any(figure.smoke for figure in figures),
        finals="" if titled else axis,
    )


def _is_plain(figure: FigureResult) -> bool:
    return not figure.title and len(figure.panels) == 1


def _name_apart(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many of the folders above as tell them apart."""
    if len(set(folders)) < len(folders):
        raise ConfigError("a folder is named twice; name each once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def _group_parts(parts: Sequence[_Part]) -> tuple[list[PanelResult], str]:
    """Return a panel for each setting, and the key if they differ in a single number."""
    groups: list[list[_Part]] = []
    for part in parts:
        alike = next((group for group in groups if group[0].settings == part.settings), None)
        if alike is None:
            groups.append([part])
        else:
            alike.append(part)
    differing = _list_differing([group[0].settings for group in groups])
    panels = [
        PanelResult(_name_group(group, differing) if len(groups) > 1 else "", _merge_parts(group))
        for group in groups
    ]
    numbers = len(differing) == 1 and all(
        _is_number(group[0].settings.get(differing[0], "")) for group in groups
    )
    return panels, differing[0].rpartition(".")[2] if numbers else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _list_differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]


def _name_group(group: Sequence[_Part], differing: Sequence[str]) -> str:
    if len(differing) > _MOST_NAMED:
        return " + ".join(part.folder for part in group)
    return _name_settings(group[0].settings, differing)


def _name_settings(settings: Mapping[str, str], keys: Iterable[str]) -> str:
    """Write settings as a title; the value of a partition or a name tells enough.

    >>> _name_settings({"partition": '"iid"', "algorithm.lr": "0.1"}, ["partition", "algorithm.lr"])
    'iid, lr = 0.1'
    """
    pairs = ((key.rpartition(".")[2], settings.get(key, "none").strip('"')) for key in keys)
    return ", ".join(value if key in _TOLD else f"{key} = {value}" for key, value in pairs)


def _join_different(parts: Sequence[_Part]) -> PanelResult:
    """Return one panel of all experiments, whose strategies are named after what differs."""
    differing = _list_differing([part.settings for part in parts])
    tables = dict.fromkeys(key.partition(".")[0] for key in differing)
    renamed = []
    for part in parts:
        few = len(differing) <= _MOST_NAMED
        suffix = _name_settings(part.settings, differing) if few else part.folder
        config = part.comparison.config
        own = {k: config[k] for k in tables if k in OWN_SETTINGS and k in config}
        shared = {key: value for key, value in config.items() if key not in tables}
        entries = [{**own, **_read_entry(entry)} for entry in config["strategies"]]
        labels = {_find_label(e): f"{_find_label(e)} ({suffix})" for e in entries if suffix}
        entries = [{**e, "label": labels.get(_find_label(e), _find_label(e))} for e in entries]
        compared = replace(part.comparison, config={**shared, "strategies": entries})
        renamed.append(_Part(part.folder, _rename_runs(compared, labels)))
    return PanelResult("", _merge_parts(renamed))


def _merge_parts(parts: Sequence[_Part]) -> Comparison:
    """Return the strategies and seeds of comparisons that have the same settings."""
    if len(parts) == 1:
        return parts[0].comparison
    entries: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, int], RunResult] = {}
    missing: list[str] = []
    for part in parts:
        labels = {}
        for entry in map(_read_entry, part.comparison.config["strategies"]):
            label = _find_label(entry)
            known = entries.get(label)
            if known is not None and _drop_label(known) != _drop_label(entry):
                labels[label] = f"{label} ({_tell_apart(entry, known, part.folder, entries)})"
                label = labels[label]
            entries.setdefault(label, {**entry, "label": label})
        renamed = _rename_runs(part.comparison, labels)
        for run in renamed.runs:
            runs.setdefault((run.strategy, run.seed), run)
        missing += renamed.missing
    finished = {f"{label} seed {seed}" for label, seed in runs}
    ordered = [run for label in entries for (of, _), run in runs.items() if of == label]
    seeds = sorted({seed for part in parts for seed in part.comparison.config.get("seeds", [])})
    counts = {part.comparison.label_counts for part in parts}
    first = parts[0].comparison
    versions = [part.comparison.environment.items() for part in parts]
    return Comparison(
        config={**first.config, "strategies": list(entries.values()), "seeds": seeds},
        environment=dict(pair for pair in versions[0] if all(pair in other for other in versions)),
        runs=tuple(ordered),
        label_counts=counts.pop() if len(counts) == 1 else (),
        missing=tuple(name for name in dict.fromkeys(missing) if name not in finished),
    )


def _tell_apart(
    entry: Mapping[str, Any], known: Mapping[str, Any], folder: str, taken: Iterable[str]
) -> str:
    """Say in what an entry differs from one with the same label; else in which folder it is."""
    own, other = (flatten(_drop_label(one)) for one in (entry, known))
    texts = {key: format_toml(value) for key, value in own.items() if other.get(key) != value}
    told = _name_settings(texts, texts)
    free = f"{_find_label(entry)} ({told})" not in set(taken)
    return told if told and len(texts) <= _MOST_NAMED and free else folder


def _read_entry(entry: Any) -> dict[str, Any]:
    return dict(entry) if isinstance(entry, Mapping) else {"name": str(entry)}


def _find_label(entry: Mapping[str, Any]) -> str:
    return str(entry.get("label") or entry["name"])


def _drop_label(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "label"}


def _rename_runs(comparison: Comparison, labels: Mapping[str, str]) -> Comparison:
    def rename(name: str) -> str:
        label, _, seed = name.rpartition(" seed ")
        return f"{labels.get(label, label)} seed {seed}"

    return replace(
        comparison,
        runs=tuple(
            replace(run, strategy=labels.get(run.strategy, run.strategy)) for run in comparison.runs
        ),
        missing=tuple(map(rename, comparison.missing)),
    )
