"""How numbers, tables and the setting of an experiment are written, in terminal and page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fednorm.experiment.summary.result_table import MISSING, keep_finite
from fednorm.objects import OBJECT

_WHOLE = 100  # larger numbers have no decimals
_SHOWN = 4  # names in a list


def format_figure(mean: float | None, spread: float, seeds: int) -> str:
    """Write the mean of a metric of any size, with its spread over several seeds.

    >>> format_figure(0.71234, 0.0123, 3), format_figure(1234.5, 0.0, 1)
    ('0.7123 ± 0.012', '1234')
    """
    value = keep_finite(mean)
    written = MISSING if value is None else f"{value:.4g}"
    return f"{written} ± {spread:.2g}" if value is not None and seeds > 1 else written


def format_share(fraction: float | None) -> str:
    """Write a fraction in per cent, with three digits and the sign.

    >>> format_share(0.98765), format_share(0.00123)
    ('98.8 %', '0.123 %')
    """
    return MISSING if fraction is None else f"{100 * fraction:.3g} %"


def format_ratio(value: float | None) -> str:
    """Write a ratio or an error with three digits.

    >>> format_ratio(0.12345), format_ratio(1.5e-16), format_ratio(None)
    ('0.123', '1.5e-16', '–')
    """
    return MISSING if value is None else f"{value:.3g}"


def format_bytes(count: float | None) -> str:
    """Write a number of bytes in a unit that suits it; 1 kB = 1000 bytes.

    >>> [format_bytes(count) for count in (0, 812, 44_426.0, 1_080_000, None)]
    ['0 bytes', '812 bytes', '44.43 kB', '1.08 MB', '–']
    """
    value = keep_finite(count)
    return MISSING if value is None else decimal(round(value), precision=2)


def format_number(value: float | None) -> str:
    """Write a count or a time: whole where it is whole or large, else with one decimal.

    >>> format_number(58.0), format_number(1.25), format_number(1234.5), format_number(None)
    ('58', '1.2', '1,234', '–')
    """
    number = keep_finite(value)
    if number is None:
        return MISSING
    whole = number == round(number) or number >= _WHOLE
    return f"{number:,.0f}" if whole else f"{number:.1f}"


def list_names(names: Sequence[object]) -> str:
    """List names, or the first of many.

    >>> list_names(["a", "b"]), list_names(range(9))
    ('a, b', '0, 1, 2, 3 and 5 more')
    """
    listed = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{listed} and {more} more" if more > 0 else listed


def format_count(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> format_count(1, "client"), format_count(3, "client")
    ('1 client', '3 clients')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def capitalize(words: str) -> str:
    """Capitalize the first letter only.

    >>> capitalize("accuracy"), capitalize("mean IoU")
    ('Accuracy', 'Mean IoU')
    """
    return words[:1].upper() + words[1:]


def format_toml(value: Any) -> str:
    """Write a value as TOML in one line; empty strings are omitted, None becomes `none`.

    `tomli_w` breaks arrays into lines and refuses None.

    >>> format_toml({"name": "fixbn", "label": "", "rounds": [1, 2], "affine": False})
    '{ name = "fixbn", rounds = [1, 2], affine = false }'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{k} = {format_toml(v)}" for k, v in value.items() if v != "")
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    return str(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value of a nested config under its dotted key; empty tables have none.

    >>> flatten({"rounds": 100, "data": {"name": "digits"}})
    {'rounds': 100, 'data.name': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else None
        flat |= {f"{prefix}{key}": value} if inner is None else inner
    return flat


def split_common(
    listed: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Split mappings into their common items and the rest of each.

    >>> split_common([{"rounds": "9", "gamma": "0"}, {"rounds": "9", "gamma": "1"}])
    ({'rounds': '9'}, [{'gamma': '0'}, {'gamma': '1'}])
    """
    first, *others = listed or [{}]
    shared = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    return shared, [{k: v for k, v in one.items() if k not in shared} for one in listed]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: text, or numbers, which are right-aligned and never wrap."""

    title: str
    numbers: bool = False
    wraps: bool = False


def make_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    caption: str = "",
    ruled: bool = True,
) -> Table:
    """Return a table for the terminal; cells are plain text, not markup.

    A table is ruled below its header and leaves one space between columns; a list is not ruled
    and leaves two.
    """
    listed = list(rows)
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD if ruled else None,
        show_edge=False,
        pad_edge=False,
        padding=0 if ruled else (0, 1),
    )
    for number, column in enumerate(columns):
        widest = max((len(row[number]) for row in listed), default=0)
        table.add_column(
            column.title,
            justify="right" if column.numbers else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            # A number that is cut would be read as another number, and a name as another name.
            min_width=None if column.wraps else widest,
        )
    for row in listed:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


_WORDS = {  # partitions by name; {} is the value after "="
    "iid": "dealt at random",
    "natural": "each with the data of one source",
    "dirichlet": "class mixes of a Dirichlet distribution (α = {})",
    "gamma": "sorted by label but for a share of {}",
}
_SORTED = "sorted by label"
_NOUNS = {"digits": "digit", "mnist": "digit"}  # what a class of the data set is
_MOSTLY = 0.9  # share of its samples that a client's classes hold


def describe_setting(config: Mapping[str, Any], counts: Sequence[Sequence[int]] = ()) -> str:
    """Describe clients and their data, network, training and faults in one line.

    `counts` has the training samples of each client by label, if they are known. What the config
    does not name, and what strategies set otherwise for themselves, is left out.

    >>> config = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "partition": "gamma=0"}
    >>> describe_setting({**config, "clients": 2}, [[9, 0, 0], [0, 8, 0]])
    '2 clients, one digit each; mlp on digits'
    >>> describe_setting({**config, "clients": 2, "rounds": 600, "participation": 0.5})
    '2 clients, sorted by label, 50 % of them per round; mlp on digits; 600 rounds'
    >>> swept = [{"name": "fbn", "partition": "iid"}, {"name": "gn"}]
    >>> describe_setting({**config, "clients": 2, "strategies": swept})
    '2 clients; mlp on digits'
    """
    for entry in config.get("strategies", ()):
        if isinstance(entry, Mapping):
            config = _leave_out(config, entry)
    parts = (
        ", ".join(_describe_clients(config, counts)),
        " on ".join(_describe_choice(config[key]) for key in ("model", "data") if config.get(key)),
        ", ".join(_describe_training(config)),
        ", ".join(_describe_faults(config)),
    )
    return "; ".join(part for part in parts if part)


def _leave_out(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that have other values in `own`."""
    kept = {}
    for key, value in settings.items():
        other = own.get(key, value)
        fields = isinstance(value, Mapping) and isinstance(other, Mapping)
        if fields and other.get("name", value.get("name")) == value.get("name"):
            kept[key] = _leave_out(value, other)
        elif other == value:
            kept[key] = value
    return kept


def _describe_clients(config: Mapping[str, Any], counts: Sequence[Sequence[int]]) -> list[str]:
    number, participation = config.get("clients"), config.get("participation", 1.0)
    listed = [] if number is None else [format_count(number, "client")]
    listed += [_describe_classes(counts, _find_noun(config)) or _describe_partition(config)]
    if participation != 1.0:
        listed += [f"{format_share(participation)} of them per round"]
    return [part for part in listed if part]


def _find_noun(config: Mapping[str, Any]) -> str:
    return _NOUNS.get(_find_name(config.get("data", "")), "class")


def _describe_classes(counts: Sequence[Sequence[int]], noun: str) -> str:
    """Say how many classes a client mostly has; nothing where one has nearly all of them."""
    held = [_count_classes(row) for row in counts]
    if not held or max(held) >= _MOSTLY * len(counts[0]):
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
        listed.append(f"{format_count(rounds, 'round')}{of}")
    for key, unit in (("local_steps", "local step"), ("local_epochs", "local epoch")):
        if number := config.get(key):
            listed.append(f"{format_count(number, unit)} per round")
    return listed


def _describe_faults(config: Mapping[str, Any]) -> list[str]:
    listed = []
    if byzantine := config.get("byzantine"):
        attack = f" ({_describe_choice(config['attack'])})" if config.get("attack") else ""
        listed.append(f"{format_count(byzantine, 'Byzantine client')}{attack}")
    if dropout := config.get("client_dropout"):
        listed.append(f"{format_share(dropout)} of replies lost")
    if config.get("privacy"):
        listed.append("differential privacy")
    return listed


def _find_name(value: Any) -> str:
    return str(value.get("name", "")) if isinstance(value, Mapping) else str(value)


def _describe_choice(value: Any) -> str:
    """Write a name with its plain fields.

    >>> _describe_choice({"name": "dsgd", "lr": 0.05, "schedule": "", "steps": [1]})
    'dsgd (lr 0.05)'
    >>> _describe_choice({"name": "object:torchvision.models.ViT", "source": "1f", "content": "2c"})
    'your ViT'
    """
    if not isinstance(value, Mapping):
        return str(value)
    if _find_name(value).startswith(OBJECT):
        return f"your {_find_name(value).removeprefix(OBJECT).rpartition('.')[2]}"
    plain = {k: v for k, v in value.items() if isinstance(v, str | int | float) and v != ""}
    words = (v if isinstance(v, str) else format_toml(v) for k, v in plain.items() if k != "name")
    keys = (k for k in plain if k != "name")
    details = ", ".join(f"{key} {word}" for key, word in zip(keys, words, strict=True))
    return _find_name(value) + (f" ({details})" if details else "")
