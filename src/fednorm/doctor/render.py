"""The report for the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.doctor.findings import ClientShift, Cost, DoctorReport, State
from fednorm.report.format import (
    MISSING,
    Column,
    format_number,
    format_ratio,
    format_share,
    make_table,
)

_TEXT = {"layer", "type", "place", "strategy", "statistics", "kind", "keeps", "note"}


def show(report: DoctorReport) -> Group:
    """Return the whole report."""
    return Group(*_render_parts(report))


def _render_parts(report: DoctorReport) -> Iterator[RenderableType]:
    model = report.model
    algorithm = ", ".join(f"{key} {value}" for key, value in model.algorithm.items())
    yield Text(
        f"{model.name}: {model.type}, {format_number(model.parameters)} parameters", style="bold"
    )
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


def _tabulate_layers(report: DoctorReport) -> Table:
    rows = [
        [
            *(x.path or "(the model)", x.type),
            *(format_number(x.channels), format_number(x.values)),
            *(f"{x.place} ({x.after})" if x.after else x.place, format_number(x.calls)),
        ]
        for x in report.layers
    ]
    columns = ["layer", "type", "channels", "values", "place", "calls"]
    return _tabulate("Normalization layers, and what they directly follow", columns, rows)


def _tabulate_state(state: State) -> Table:
    sizes = {
        "weights": state.weights,
        "affine": state.affine,
        "statistics": state.statistics,
        "counters": state.counters,
    }
    rows = [
        [k, format_number(v), format_share(v / state.total if state.total else 0)]
        for k, v in sizes.items()
    ]
    return _tabulate("State", ["kind", "bytes", "share"], rows)


def _tabulate_costs(costs: Sequence[Cost]) -> Table:
    rows = [
        [
            cost.strategy,
            format_number(cost.exchanges),
            format_number(cost.bytes_up),
            format_number(cost.bytes_down),
            _list_kept(cost),
            "; ".join(_list_notes(cost)),
        ]
        for cost in costs
    ]
    columns = ["strategy", "exchanges", "bytes up", "bytes down", "keeps", "note"]
    return _tabulate("One round of one client", columns, rows)


def _list_kept(cost: Cost) -> str:
    kept = {"personal": cost.personal_bytes, "momentum": cost.momentum_bytes}
    return "\n".join(f"{format_number(v)} B {k}" for k, v in kept.items() if v) or MISSING


def _list_notes(cost: Cost) -> Iterator[str]:
    if cost.refused:
        yield f"refuses: {cost.refused}"
    if cost.measures:
        yield "passes over all of a client's data before training"
    if cost.calibration_bytes_up is not None:
        yield (
            f"calibration before each evaluation: {format_number(cost.calibration_bytes_up)} B up, "
            f"{format_number(cost.calibration_bytes_down)} B down"
        )
    if cost.global_model is False:
        yield "no global model"
    if cost.needs_rounds:
        yield "must know the number of rounds"


def _render_clients(clients: ClientShift) -> Iterator[RenderableType]:
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


def _tabulate_distances(clients: ClientShift) -> Table:
    return _tabulate(
        "Layers",
        ["layer", "|Δmean|/σ", "σ²ᵢ/σ²", "min", "max", "bias", "alike", "excess"],
        [
            [
                x.path,
                *(
                    format_ratio(v)
                    for v in (x.shift, x.var_ratio, x.var_ratio_min, x.var_ratio_max)
                ),
                *(format_share(v) for v in (x.bias, x.bias_alike, x.excess)),
            ]
            for x in clients.layers
        ],
    )


def _tabulate_gradients(clients: ClientShift) -> Table:
    return _tabulate(
        "Gradient against that of one machine",
        ["strategy", "statistics", "deviation", "alike", "excess", "note"],
        [
            [
                g.strategy,
                g.statistics,
                *(format_ratio(v) for v in (g.deviation, g.alike, g.excess)),
                f"refuses: {g.refused}" if g.refused else "",
            ]
            for g in clients.gradients
        ],
    )


def _tabulate(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = [Column(c, numbers=c not in _TEXT, wraps=c == "note") for c in columns]
    return make_table(made, rows, title=title)
