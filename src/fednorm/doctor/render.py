"""The report for the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.doctor.findings import Clients, Cost, State
from fednorm.doctor.grid import grid
from fednorm.doctor.numbers import MISSING, count, number, percent
from fednorm.doctor.report import Report


def show(report: Report) -> Group:
    """Return the whole report."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    model = report.model
    algorithm = ", ".join(f"{key} {value}" for key, value in model.algorithm.items())
    yield Text(f"{model.name}: {model.type}, {count(model.parameters)} parameters", style="bold")
    yield Text(
        f"samples of shape {model.shape}, {model.classes} classes, {model.dtype}; "
        f"algorithm {algorithm}; seed {model.seed}\n"
    )
    if report.layers:
        yield from _spaced(_layers(report))
    yield from _spaced(_state(report.state))
    yield from _spaced(_strategies(report.strategies))
    if report.clients:
        yield from _clients(report.clients)
    yield Text("Warnings", style="bold")
    yield from (Text(f"- {caution.text}") for caution in report.warnings)
    advice = report.recommendation
    yield Text(f"\nRecommendation: {advice.strategy or MISSING}", style="bold")
    yield from (Text(f"- {reason}") for reason in advice.reasons)


def _spaced(table: Table) -> Iterator[RenderableType]:
    yield table
    yield Text()


def _layers(report: Report) -> Table:
    rows = [
        [
            *(x.path or "(the model)", x.type),
            *(count(x.channels), count(x.values)),
            *(f"{x.place} ({x.after})" if x.after else x.place, count(x.calls)),
        ]
        for x in report.layers
    ]
    columns = ["layer", "type", "channels", "values", "place", "calls"]
    return grid("Normalization layers, and what they directly follow", columns, rows)


def _state(state: State) -> Table:
    sizes = {
        "weights": state.weights,
        "affine": state.affine,
        "statistics": state.statistics,
        "counters": state.counters,
    }
    rows = [[k, count(v), percent(v / state.total if state.total else 0)] for k, v in sizes.items()]
    return grid("State", ["kind", "bytes", "share"], rows)


def _strategies(costs: Sequence[Cost]) -> Table:
    rows = [
        [
            cost.strategy,
            count(cost.exchanges),
            count(cost.bytes_up),
            count(cost.bytes_down),
            _kept(cost),
            "; ".join(_notes(cost)),
        ]
        for cost in costs
    ]
    columns = ["strategy", "exchanges", "bytes up", "bytes down", "keeps", "note"]
    return grid("One round of one client", columns, rows)


def _kept(cost: Cost) -> str:
    kept = {"personal": cost.personal_bytes, "momentum": cost.momentum_bytes}
    return "\n".join(f"{count(v)} B {k}" for k, v in kept.items() if v) or MISSING


def _notes(cost: Cost) -> Iterator[str]:
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


def _clients(clients: Clients) -> Iterator[RenderableType]:
    left = f"; {len(clients.left_out)} left out" if clients.left_out else ""
    yield Text(
        f"Clients: {clients.data}, {clients.partition}, {clients.clients} clients{left}, "
        f"{clients.batches} batches each, at the initial weights",
        style="bold",
    )
    if clients.unmeasured:
        yield Text(f"not measured: {clients.unmeasured}\n")
        return
    yield from _spaced(_distances(clients))
    yield from _spaced(_gradients(clients))


def _distances(clients: Clients) -> Table:
    return grid(
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


def _gradients(clients: Clients) -> Table:
    return grid(
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
