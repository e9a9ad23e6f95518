"""The report for the terminal, and how its numbers are written.

Tables and sentences write numbers alike, so that a reader finds those of a sentence in the tables.
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.doctor.findings import Clients, Cost, Report, State

MISSING = "–"
_SHOWN = 4  # names in a list
_TEXT = {"layer", "type", "place", "strategy", "statistics", "kind", "keeps", "note"}


def show(report: Report) -> Group:
    """Return the whole report."""
    return Group(*_render_parts(report))


def _render_parts(report: Report) -> Iterator[RenderableType]:
    model = report.model
    algorithm = ", ".join(f"{key} {value}" for key, value in model.algorithm.items())
    yield Text(f"{model.name}: {model.type}, {count(model.parameters)} parameters", style="bold")
    yield Text(
        f"samples of shape {model.shape}, {model.classes} classes, {model.dtype}; "
        f"algorithm {algorithm}; seed {model.seed}\n"
    )
    if report.layers:
        yield from _add_space(_tabulate_layers(report))
    yield from _add_space(_tabulate_state(report.state))
    yield from _add_space(_tabulate_costs(report.strategies))
    if report.clients:
        yield from _render_clients(report.clients)
    yield Text("Warnings", style="bold")
    yield from (Text(f"- {caution.text}") for caution in report.warnings)
    advice = report.recommendation
    yield Text(f"\nRecommendation: {advice.strategy or MISSING}", style="bold")
    yield from (Text(f"- {reason}") for reason in advice.reasons)


def _add_space(table: Table) -> Iterator[RenderableType]:
    yield table
    yield Text()


def _tabulate_layers(report: Report) -> Table:
    rows = [
        [
            *(x.path or "(the model)", x.type),
            *(count(x.channels), count(x.values)),
            *(f"{x.place} ({x.after})" if x.after else x.place, count(x.calls)),
        ]
        for x in report.layers
    ]
    columns = ["layer", "type", "channels", "values", "place", "calls"]
    return make_table("Normalization layers, and what they directly follow", columns, rows)


def _tabulate_state(state: State) -> Table:
    sizes = {
        "weights": state.weights,
        "affine": state.affine,
        "statistics": state.statistics,
        "counters": state.counters,
    }
    rows = [[k, count(v), percent(v / state.total if state.total else 0)] for k, v in sizes.items()]
    return make_table("State", ["kind", "bytes", "share"], rows)


def _tabulate_costs(costs: Sequence[Cost]) -> Table:
    rows = [
        [
            cost.strategy,
            count(cost.exchanges),
            count(cost.bytes_up),
            count(cost.bytes_down),
            _list_kept(cost),
            "; ".join(_list_notes(cost)),
        ]
        for cost in costs
    ]
    columns = ["strategy", "exchanges", "bytes up", "bytes down", "keeps", "note"]
    return make_table("One round of one client", columns, rows)


def _list_kept(cost: Cost) -> str:
    kept = {"personal": cost.personal_bytes, "momentum": cost.momentum_bytes}
    return "\n".join(f"{count(v)} B {k}" for k, v in kept.items() if v) or MISSING


def _list_notes(cost: Cost) -> Iterator[str]:
    if cost.refused:
        yield f"refuses: {cost.refused}"
    if cost.measures:
        yield "passes over all of a client's data before it trains"
    if cost.survey_bytes_up is not None:
        yield (
            f"one survey before an evaluation: {count(cost.survey_bytes_up)} B up, "
            f"{count(cost.survey_bytes_down)} B down"
        )
    if cost.global_model is False:
        yield "no global model"
    if cost.needs_rounds:
        yield "must know the number of rounds"


def _render_clients(clients: Clients) -> Iterator[RenderableType]:
    left = f"; {len(clients.left_out)} left out" if clients.left_out else ""
    yield Text(
        f"Clients: {clients.data}, {clients.partition}, {clients.clients} clients{left}, "
        f"{clients.batches} batches each, at the initial weights",
        style="bold",
    )
    if clients.unmeasured:
        yield Text(f"not measured: {clients.unmeasured}\n")
        return
    yield from _add_space(_tabulate_distances(clients))
    yield from _add_space(_tabulate_gradients(clients))


def _tabulate_distances(clients: Clients) -> Table:
    return make_table(
        "Layers",
        ["layer", "|Δmean|/σ", "σ²ᵢ/σ²", "min", "max", "bias", "alike", "excess"],
        [
            [
                x.path,
                *(number(v) for v in (x.shift, x.var_ratio, x.var_ratio_min, x.var_ratio_max)),
                *(percent(v) for v in (x.bias, x.bias_alike, x.excess)),
            ]
            for x in clients.layers
        ],
    )


def _tabulate_gradients(clients: Clients) -> Table:
    return make_table(
        "Gradient against that of one machine",
        ["strategy", "statistics", "deviation", "alike", "excess", "note"],
        [
            [
                g.strategy,
                g.statistics,
                *(number(v) for v in (g.deviation, g.alike, g.excess)),
                f"refuses: {g.refused}" if g.refused else "",
            ]
            for g in clients.gradients
        ],
    )


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; columns of text are left-justified, numbers are not."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    for column in columns:
        # A number that is broken would be read as another number.
        text = column in _TEXT
        table.add_column(
            column,
            justify="left" if text else "right",
            no_wrap=column != "note",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def number(value: float | None) -> str:
    """Write a ratio with three digits.

    >>> number(0.12345), number(1.5e-16), number(None)
    ('0.123', '1.5e-16', '–')
    """
    return MISSING if value is None else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """Write a fraction in per cent.

    >>> percent(0.98765), percent(0.00123)
    ('98.8 %', '0.123 %')
    """
    return MISSING if fraction is None else f"{100 * fraction:.3g} %"


def count(value: float | None) -> str:
    """Write a number of bytes or of other things, to the last digit.

    >>> count(44426.0), count(None)
    ('44,426', '–')
    """
    return MISSING if value is None else f"{value:,.0f}"


def list_names(names: Sequence[object]) -> str:
    """List names, or the first of many.

    >>> list_names(["a", "b"]), list_names(range(9))
    ('a, b', '0, 1, 2, 3 and 5 more')
    """
    listed = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{listed} and {more} more" if more > 0 else listed
