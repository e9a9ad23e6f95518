"""The report for the terminal: one page; `DoctorReport.to_json` has everything."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.doctor.findings import DoctorReport, Entrant, Race, average
from fednorm.doctor.race import BASELINE
from fednorm.report.format import (
    MISSING,
    Column,
    format_number,
    format_percent,
    format_ratio,
    format_share,
    make_table,
)

_WARNINGS = 3  # shown
_NOTE = 40  # characters


def show(report: DoctorReport) -> Group:
    """Return the page: the recommendation, its reasons, and how to run it."""
    return Group(*_render_parts(report))


def _render_parts(report: DoctorReport) -> Iterator[RenderableType]:
    advice = report.recommendation
    at = f" at lr {advice.lr:g}" if advice.lr else ""
    yield Text(f"Recommendation: {advice.strategy or MISSING}{at}", style="bold")
    yield from (Text(reason) for reason in advice.reasons)
    if report.race and report.race.entrants:
        yield from _render_race(report.race)
        yield from _describe_personal(report.race)
    yield Text("\nModel and clients", style="bold")
    yield from (Text(f"- {line}") for line in _describe_findings(report))
    shown = report.warnings[:_WARNINGS]
    yield from (Text(f"- {caution.text}") for caution in shown)
    if more := len(report.warnings) - len(shown):
        yield Text(f"- {more} more warning{'s' if more > 1 else ''}: --json - prints everything.")
    if advice.commands:
        yield Text("\nRun it", style="bold")
        yield from (Text(command) for command in advice.commands)


def _render_race(race: Race) -> Iterator[RenderableType]:
    samples = max(entrant.tested for entrant in race.entrants)
    yield Text(
        f"\nRace: {race.rounds} of {race.wanted} rounds, accuracy on {samples} validation samples",
        style="bold",
    )
    yield _tabulate_race(race)
    if race.ended != "finished":
        yield Text("Interrupted." if race.ended == "interrupted" else "The time was up.")


def _tabulate_race(race: Race) -> Table:
    best: dict[str, Entrant] = {}
    for entrant in race.entrants:
        known = best.get(entrant.strategy)
        if known is None or _sort_key(entrant) > _sort_key(known):
            best[entrant.strategy] = entrant
    columns = [Column("strategy"), *(Column(c, numbers=True) for c in ("lr", "rounds", "%"))]
    rows = [
        [
            entrant.strategy + (" (personal)" if entrant.personal else ""),
            f"{entrant.lr:g}",
            format_number(entrant.rounds),
            format_percent(average(entrant, entrant.rounds) if entrant.marks else None),
            _describe_status(entrant),
        ]
        for entrant in sorted(best.values(), key=_sort_key, reverse=True)
    ]
    return make_table([*columns, Column("note")], rows)


def _sort_key(entrant: Entrant) -> tuple[bool, bool, int, float]:
    ended = entrant.status in {"refused", "diverged"}
    return not entrant.personal, not ended, entrant.rounds, average(entrant, entrant.rounds)


def _describe_status(entrant: Entrant) -> str:
    if entrant.status == "refused":
        return f"refused: {entrant.note or ''}"[:_NOTE]
    if entrant.status == "diverged":
        return f"diverged in round {entrant.rounds + 1}"
    return "" if entrant.status == "racing" else "dropped"


def _describe_personal(race: Race) -> Iterator[Text]:
    """Compare models that stay with their clients with naive, each client on its own samples."""
    personal = [e for e in race.entrants if e.personal and e.status == "racing" and e.marks]
    naives = [e for e in race.entrants if e.strategy == BASELINE and e.marks]
    if not personal or not naives:
        return
    best = max(personal, key=lambda e: e.score(e.rounds) or 0.0)
    naive = max((e.score(best.rounds, own=True) or 0.0) for e in naives)
    yield Text(
        f"If each client may have its own model: {best.strategy} "
        f"{format_percent(best.score(best.rounds))} % on clients' own samples, where {BASELINE} "
        f"has {format_percent(naive)} %."
    )


def _describe_findings(report: DoctorReport) -> Iterator[str]:
    model, layers = report.model, [layer for layer in report.layers if layer.batch_norm]
    places = [layer.place for layer in layers]
    counts = ", ".join(f"{places.count(p)} after {p}" for p in dict.fromkeys(places))
    yield (
        f"{model.name}: {format_number(model.parameters)} parameters; {len(layers)} of "
        f"{len(report.layers)} normalization layers are BatchNorm"
        f"{f' ({counts})' if counts else ''}."
    )
    clients = report.clients
    if clients and clients.unmeasured:
        yield f"clients not measured: {clients.unmeasured}"
    found = [x for x in (clients.layers if clients else ()) if x.excess is not None]
    if clients and found:
        worst = max(found, key=lambda x: x.excess or 0.0)
        naive = next(g for g in clients.gradients if g.strategy == BASELINE)
        yield (
            f"{clients.clients} clients of {clients.data}, {clients.partition}: averaging misses "
            f"{format_share(worst.bias)} of the variance in layer {worst.path!r} (by chance "
            f"{format_share(worst.bias_alike)}); naive's first gradient is "
            f"{format_ratio(naive.deviation)} away from one machine's (by chance "
            f"{format_ratio(naive.alike)})."
        )
    for cost in report.strategies:
        if cost.strategy in {BASELINE, report.recommendation.strategy} and not cost.refused:
            yield (
                f"{cost.strategy} sends {format_number(cost.bytes_up)} B up, "
                f"{format_number(cost.bytes_down)} B down per client and round"
                f"{', and must know the number of rounds' if cost.needs_rounds else ''}."
            )
