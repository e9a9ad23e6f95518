"""Recommend what won the race by more than chance, or else plain averaging; write the report.

The report for the terminal is one page; `DoctorReport.to_json` has everything.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.data.partition.feature_shift import FeatureShift
from fednorm.data.partition.label_skew import (
    Dirichlet,
    DirichletUnbalanced,
    Gamma,
    Natural,
    Shards,
)
from fednorm.doctor.findings import (
    SURE,
    DoctorReport,
    Entrant,
    Examination,
    Race,
    Recommendation,
    average,
    estimate_noise,
)
from fednorm.doctor.race import BASELINE, CALIBRATED
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.summary.result_table import MISSING, format_percent
from fednorm.report.format import (
    Column,
    format_count,
    format_number,
    format_ratio,
    format_share,
    format_toml,
    make_table,
)

_BY_LABELS = (Gamma, Shards, Dirichlet, DirichletUnbalanced)
_BY_FEATURES = (FeatureShift, Natural)

# A race of a smaller share of the user's rounds shows who is fast at the start, unless far ahead.
EARLY, FAR = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class Duel:
    """An entrant, and naive at its best learning rate, after equally many rounds."""

    entrant: Entrant
    naive: Entrant | None  # None if no naive run came to a test
    rounds: int

    @property
    def lead(self) -> float:
        """The difference of their accuracies."""
        return average(self.entrant, self.rounds) - average(self.naive, self.rounds)

    @property
    def noise(self) -> float:
        """How large the difference may be by chance."""
        return estimate_noise((self.entrant, self.naive), self.rounds)


def pair_up(race: Race) -> list[Duel]:
    """Return the duels of all that stayed in the race, in the order of the candidates."""
    naives = [e for e in race.entrants if e.strategy == BASELINE and e.status != "diverged"]
    reached = max((e.rounds for e in naives), default=0)
    duels = []
    for entrant in race.entrants:
        if entrant.personal or entrant.strategy == BASELINE or entrant.status != "racing":
            continue
        rounds = min(entrant.rounds, reached) if reached else entrant.rounds
        naive = max(naives, key=lambda e: average(e, rounds)) if reached else None
        if entrant.score(rounds) is not None:
            duels.append(Duel(entrant, naive, rounds))
    return duels


def recommend(exam: Examination) -> Recommendation:
    """Return the winner of the race; without a race, say what it needs."""
    layers, race = len(exam.batch_norms), exam.race
    if not layers:
        why = f"0 of {len(exam.layers)} normalization layers are BatchNorm, so there is nothing to"
        return Recommendation("none", (f"{why} fix: 'none' trains the model unchanged.",))
    if exam.clients is None:
        why = f"what suits the {layers} BatchNorm layers depends on the clients"
        return Recommendation(None, (f"{why}: give --data or --partition for a race.",))
    advice = _weigh(race)
    return replace(advice, reasons=(*advice.reasons, *cite_study(exam)))


def _weigh(race: Race | None) -> Recommendation:
    if race is None:
        return Recommendation(None, ("there was no race, as the budget is 0.",))
    if not race.rounds:
        minutes = math.ceil((race.needed or 0) / 60)
        return Recommendation(
            None, (f"the time is too short for a race: give --budget {minutes}m.",)
        )
    return judge(race)


def cite_study(exam: Examination) -> Iterator[str]:
    """Yield what ended above naive where a setting like the user's was run at length."""
    setting, partition = exam.experiment, exam.experiment.partition_rule
    one_step = not setting.local_epochs and (setting.local_steps or 1) == 1
    after = all(layer.place == "activation" for layer in exam.batch_norms)
    if isinstance(partition, _BY_LABELS) and one_step:
        found, page = ("fbn" if after else "dualbn"), "choose"
        where = f"one step a round and BatchNorm {'after' if after else 'before'} the activation"
    elif isinstance(partition, _BY_LABELS):
        found, page, where = "alignbn and gn_ws", "own-methods", "local steps and few classes each"
    elif isinstance(partition, _BY_FEATURES) and not one_step:
        found, page, where = "gn_ws (fedbn for a model each)", "choose", "local steps"
    else:
        return
    yield f"At length, with {where}, {found} ended above {BASELINE} (docs/{page}.md)."


def judge(race: Race) -> Recommendation:
    """Return the simplest of the winners that are equal up to chance; without a winner, naive.

    In a race that is much shorter than the user's run a small lead does not count, except that of
    calibration, which does not change the training.
    """
    duels = pair_up(race)
    winners = [d for d in duels if d.lead > d.noise]
    early = [d for d in winners if _is_early(d, race)]
    winners = [d for d in winners if d not in early or d.entrant.strategy == CALIBRATED]
    said = [_describe_early(max(early, key=lambda d: d.lead), race)] if early else []
    if winners:
        best = max(winners, key=lambda d: d.lead)
        chosen = next(
            d
            for d in winners
            if best.lead - d.lead <= estimate_noise((best.entrant, d.entrant), d.rounds) / SURE
        )
        return _give(chosen, _describe_win(chosen, race.wanted), *said)
    naives = [e for e in race.entrants if e.strategy == BASELINE and e.status == "racing"]
    naive = max(naives, key=lambda e: average(e, e.rounds), default=None)
    if naive is None or not naive.marks:
        return Recommendation(None, ("no candidate came as far as a test.",))
    drawn = said or _describe_draw(duels)
    reached = f"{_describe(naive, naive.rounds)} after {naive.rounds} of {race.wanted} rounds."
    return _give(Duel(naive, naive, naive.rounds), reached, *drawn)


def _is_early(duel: Duel, race: Race) -> bool:
    share = duel.rounds / race.wanted
    return share < EARLY / 4 or (share < EARLY and duel.lead < FAR)


def _describe_early(duel: Duel, race: Race) -> str:
    minutes = math.ceil(race.seconds / 60 * EARLY * race.wanted / duel.rounds)
    return (
        f"{_describe(duel.entrant, duel.rounds)} so far, but {duel.rounds} of {race.wanted} rounds "
        f"are too few to tell: give --budget {minutes}m or more."
    )


def _give(duel: Duel, *reasons: str) -> Recommendation:
    return Recommendation(
        duel.entrant.strategy,
        reasons,
        settings=duel.entrant.settings,
        lr=duel.entrant.lr,
        rounds=duel.rounds,
        accuracy=average(duel.entrant, duel.rounds),
        naive=average(duel.naive, duel.rounds) if duel.naive else None,
        noise=duel.noise,
    )


def _describe_win(duel: Duel, wanted: int) -> str:
    reached = f"{_describe(duel.entrant, duel.rounds)} after {duel.rounds} of {wanted} rounds"
    if duel.naive is None:
        return f"{reached}; {BASELINE} came to no test."
    return (
        f"{reached}, and {_describe(duel.naive, duel.rounds)}: a lead of "
        f"{format_percent(duel.lead)} points, of which {format_percent(duel.noise)} may be chance."
    )


def _describe_draw(duels: Sequence[Duel]) -> list[str]:
    if not duels:
        return ["No rival stayed in the race."]
    best = max(duels, key=lambda d: d.lead)
    rival = _describe(best.entrant, best.rounds)
    said = ["No clear winner: no rival led by more than chance; keep plain FedAvg."]
    if best.lead > 0:
        chance = format_percent(best.noise)
        said = [f"No clear winner: {rival}, but {chance} points may be chance. Keep plain FedAvg."]
    calibrated = [d for d in duels if d.entrant.strategy == CALIBRATED and d.lead >= 0]
    if calibrated:
        accuracy = format_percent(average(calibrated[0].entrant, calibrated[0].rounds))
        said.append(f"Calibrated before use ({CALIBRATED}), the same model reached {accuracy} %.")
    return said


def _describe(entrant: Entrant, rounds: int) -> str:
    accuracy = format_percent(average(entrant, rounds))
    return f"{entrant.strategy} reached {accuracy} % at lr {entrant.lr:g}"


# Keys that are options of `fednorm compare`; others are written with --set.
_OPTIONS = (
    *("data", "model", "partition", "clients", "participation", "algorithm", "rounds"),
    *("batch_size", "local_steps", "local_epochs"),
)


def write_commands(advice: Recommendation, experiment: Experiment, *, named: bool) -> list[str]:
    """Return the command that compares the recommendation with naive, and the line for Flower."""
    if advice.strategy is None or advice.lr is None:
        return []
    own = {key: value for key, value in advice.settings.items() if key not in {"name", "label"}}
    name = advice.settings["name"]
    names = ",".join(dict.fromkeys([BASELINE, name]))
    tables = [{"name": BASELINE}, advice.settings]
    words = [_set("strategies", tables) if own else f"--strategies {names}"]
    settings = experiment.model_dump(exclude_defaults=True, exclude={"strategies", "seeds"})
    settings["algorithm"] = {**settings["algorithm"], "lr": advice.lr}
    if not named:
        settings["model"] = {"name": "package.module:function"}
    for key, value in settings.items():
        if key not in _OPTIONS and not isinstance(value, dict):
            words.append(_set(key, value))
            continue
        fields = dict(value) if isinstance(value, dict) else {"name": value}
        if "name" in fields:
            words.append(f"--{key.replace('_', '-')} {shlex.quote(str(fields.pop('name')))}")
        plain = [k for k in ("lr", "momentum") if key == "algorithm" and k in fields]
        words += [f"--{k} {fields.pop(k):g}" for k in plain]
        words += [_set(f"{key}.{k}", v) for k, v in fields.items()]
    arguments = "".join(f", {key}={value!r}" for key, value in own.items())
    strategy = f'fednorm.create_strategy("{name}"{arguments})' if own else f'"{name}"'
    flower = f"fednorm.flower.NormStrategy({strategy}, model=model)  # in a Flower app"
    return [" ".join(["fednorm compare", *words]), flower]


def _set(key: str, value: Any) -> str:
    return f"--set {shlex.quote(f'{key}={format_toml(value)}')}"


_WARNINGS = 3  # shown
_NOTE = 40  # characters


def show(report: DoctorReport) -> Group:
    """Return the page: the recommendation, its reasons, and how to run it.

    >>> rich.print(show(fednorm.doctor.examine("resnet")))  # doctest: +SKIP
    """
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
        yield Text(f"- {format_count(more, 'more warning')}: --json - prints everything.")
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
