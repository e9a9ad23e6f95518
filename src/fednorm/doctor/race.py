"""Race candidate strategies in the user's own setting, on validation data, within a budget.

All candidates train for a quarter of the race at every learning rate; each strategy continues at
its best one to half of the race, and the better half of the strategies to the end. Naive always
stays. Runs are paused and resumed in memory, and are otherwise those of `fednorm compare`;
schedules, warm-ups and freezing rounds scale to the length of the race.

The models are tested on a fifth of the training samples, which no client trains on; the test
samples are never used. Models that stay with a client are tested on its own samples.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Any

from fednorm.algorithms.base import SGD
from fednorm.core.types import Kind, Role
from fednorm.doctor.costs import REFUSALS, ExaminedModel, describe_error
from fednorm.doctor.findings import Budget, Entrant, Mark, Race, estimate_noise
from fednorm.engines.base import RoundResult
from fednorm.errors import FednormError
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.callbacks.base import Monitor, StopFlag
from fednorm.experiment.checkpoint import Checkpoint, RunRecorder
from fednorm.experiment.comparison import hold_out
from fednorm.experiment.prepare import prepare
from fednorm.experiment.results import Event, RunResult
from fednorm.experiment.run import evaluate, run
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from fednorm.experiment.schema.specs import StrategySpec

BASELINE, CALIBRATED = "naive", "heterofl"  # with the same weights
# Strategies that are raced, as a TOML file would list them: names, or tables with settings. One
# that exchanges within a round is raced where a round is one step.
CANDIDATES: tuple[str | Mapping[str, Any], ...] = (
    BASELINE,
    CALIBRATED,
    *("fixbn", "fbn", "dualbn", "alignbn", "hbn", "gn", "gn_ws", "fedtan"),
    *("fedbn", "silobn"),  # personal: never ranked against the others
)
RATES = (1.0, 0.3, 3.0)  # learning rates, as multiples of the user's
SHORTEST = 8  # rounds; a race of fewer has one learning rate only
FINALISTS = 4
SEEDS = 3  # at most
EVALUATIONS = 16  # of a run that reaches the end
_PROBE = 0.05  # share of a budget in which a round is timed
_MARGIN = 1.6  # other strategies are slower
_PREPARATIONS = 4  # of runs, for each run of the whole length


@dataclass(slots=True)
class Clock:
    """Ends a race: at its deadline, or when the user asks for it."""

    deadline: float
    stop: StopFlag | None = None
    interrupted: bool = False

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        return self.deadline - perf_counter()

    def is_set(self) -> bool:
        """Return whether the race is over."""
        self.interrupted = self.interrupted or (self.stop is not None and self.stop.is_set())
        return self.interrupted or self.left < 0


@dataclass(slots=True)
class Leg:
    """The part of a run up to a round: stops it there, and keeps its state in memory."""

    target: int
    clock: Clock
    round: int = 0
    reached: Checkpoint | None = None

    def note_round(self, event: Event) -> None:
        """Follow the run."""
        self.round = event.round

    def is_set(self) -> bool:
        """Return whether the run should pause."""
        return self.round >= self.target or self.clock.is_set()

    def after(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Keep nothing while the run continues."""

    def save(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Keep the state of the paused run."""
        self.reached = Checkpoint(result.state, result.client_states, recorder.record())

    def end(self, result: RoundResult, recorder: RunRecorder, status: str) -> None:
        """Keep nothing of a run that is over."""


@dataclass(frozen=True, slots=True)
class Runner:
    """An entrant with the state in which its run is paused."""

    entrant: Entrant
    entry: StrategySpec
    paused: Checkpoint | None = None

    def score(self, rounds: int) -> float:
        """Return the accuracy after some rounds; 0 if there is none."""
        racing = self.entrant.status == "racing"
        return (self.entrant.score(rounds) if racing else None) or 0.0


@dataclass(frozen=True, slots=True)
class Track:
    """Where a race is run: the examined model and setting, a length, and who watches."""

    examined: ExaminedModel
    rounds: int
    seed: int
    clock: Clock
    monitor: Monitor

    def advance(self, runner: Runner, target: int) -> Runner:
        """Run an entrant up to a round; it may stop earlier, diverge or be refused."""
        entrant = runner.entrant
        if entrant.status != "racing" or entrant.rounds >= target or self.clock.is_set():
            return runner
        try:
            prepared = self.prepare(runner)
        except REFUSALS as error:
            why = describe_error(error).partition(f"lr {entrant.lr:g}: ")
            refused = replace(entrant, status="refused", note=why[2] or why[0])
            return replace(runner, entrant=refused)
        leg = Leg(target, self.clock)
        watched = Monitor([leg.note_round, *self.monitor.callbacks], leg)
        result = run(prepared, watched, saves=leg, start=runner.paused)
        if result.status == "interrupted" and not leg.is_set():
            self.clock.interrupted = True  # Ctrl-C that no flag has caught
        return Runner(_record(entrant, result), runner.entry, leg.reached)

    def prepare(self, runner: Runner) -> PreparedRun:
        """Prepare the run of a candidate, as long as the race."""
        asked, entry, lr = self.examined.experiment, runner.entry, runner.entrant.lr
        fields = entry.known_fields
        algorithm = {**asked.algorithm.model_dump(), "lr": lr}
        warmup = algorithm.get("warmup", asked.make_strategy(entry).warmup)
        if isinstance(warmup, int):
            algorithm["warmup"] = round(warmup * min(1.0, self.rounds / asked.rounds))
        named = {**runner.entrant.settings, "label": f"{entry.title}, lr {lr:g}"}
        values = {
            **asked.model_dump(exclude_none=True),
            "strategies": [named],
            "strategy": {key: value for key, value in asked.strategy.items() if key in fields},
            "data": {"name": f"{__name__}:{hold_out.__name__}", "of": asked.data.model_dump()},
            "algorithm": algorithm,
            "rounds": self.rounds,
            "seeds": [self.seed],
            "eval_every": max(1, self.rounds // EVALUATIONS),
            "evaluate": "clients",
            "engine": "auto" if asked.engine == "flower" else asked.engine,
            "client_state_memory": asked.client_state_memory / (len(CANDIDATES) * len(RATES)),
        }
        raced = build_experiment(values)
        model = None if self.examined.named else self.examined.model
        return prepare(raced, raced.strategies[0], self.seed, model)


def _record(entrant: Entrant, result: RunResult) -> Entrant:
    broken = result.status in {"diverged", "stopped"}
    return replace(
        entrant,
        status="diverged" if broken else "racing",
        note=result.error if broken else None,
        rounds=result.rounds,
        tested=result.tested,
        marks=tuple(
            Mark(e.round, e.accuracy, fmean(e.per_client) if e.per_client else e.accuracy)
            for e in result.history
        ),
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds, with a margin for slower strategies."""

    round: float
    leg: float  # evaluations and preparations of a run of any length

    def count_rounds(self, seconds: float, legs: float) -> int:
        """Return how long a race may be; its parts end with a test each."""
        rounds = max(0, int((seconds / legs - self.leg) / self.round))
        return rounds - rounds % EVALUATIONS if rounds > EVALUATIONS else rounds

    def estimate_seconds(self, rounds: int, legs: float) -> float:
        """Return how long a race takes."""
        return legs * (rounds * self.round + self.leg)


def race(examined: ExaminedModel, budget: Budget, monitor: Monitor) -> Race:
    """Race the candidates; if the time is not enough for it, say what would be."""
    begun, experiment = perf_counter(), examined.experiment
    clock = Clock(math.inf if budget.rounds else begun + budget.seconds, monitor.stop)
    track = Track(examined, experiment.rounds, experiment.seeds[0], clock, monitor)
    start = enter_candidates(experiment)
    rounds, rates, pace = min(budget.rounds or 0, experiment.rounds), len(RATES), None
    if not budget.rounds:
        pace = measure_pace(track, start, _PROBE * budget.seconds)
        for rates in (len(RATES), 1):
            affordable = pace.count_rounds(clock.left, _count_legs(start, rates))
            rounds = min(affordable, experiment.rounds)
            if rounds >= min(SHORTEST, experiment.rounds):
                break
        else:
            rounds = 0
    track = replace(track, rounds=rounds)
    runners = run_stages(track, start[: len(start) * rates // len(RATES)]) if rounds else []
    if pace and runners:
        runners = repeat_duel(track, runners, pace)
    over = clock.is_set()
    return Race(
        rounds=rounds,
        wanted=experiment.rounds,
        seconds=perf_counter() - begun,
        needed=pace.estimate_seconds(SHORTEST, _count_legs(start, 1)) if pace else None,
        ended="interrupted" if clock.interrupted else "late" if over else "finished",
        entrants=tuple(r.entrant for r in runners),
    )


def enter_candidates(experiment: Experiment) -> list[Runner]:
    """Return all candidates at the start, first those at the user's learning rate."""
    lr = experiment.algorithm.fields.get("lr", SGD.lr)
    runners = []
    for rate in RATES:
        for entry in map(StrategySpec.model_validate, CANDIDATES):
            strategy = experiment.make_strategy(entry)
            if strategy.exchanges and experiment.plan.steps != 1:
                continue
            entrant = Entrant(
                entry.title,
                entry.model_dump(exclude_defaults=True),
                float(f"{lr * rate:.3g}"),
                personal=strategy.roles.get(Kind.STATISTIC) is Role.PERSONAL,
            )
            runners.append(Runner(entrant, entry))
    return runners


def _count_legs(start: Sequence[Runner], rates: int) -> float:
    """Return how many runs of the whole length a race costs."""
    personal = sum(r.entrant.personal for r in start) / len(RATES)
    ranked = len(start) / len(RATES) - personal
    return ranked * (rates + 1) / 4 + max(FINALISTS, ranked / 2) / 2 + personal


def measure_pace(track: Track, start: Sequence[Runner], seconds: float) -> Pace:
    """Time the first candidate that takes the model."""
    for runner in start:
        begun = perf_counter()
        try:
            prepared = track.prepare(runner)
        except REFUSALS:
            continue
        times = [perf_counter()]
        with suppress(FednormError):  # it may diverge
            for result in prepared.rounds():
                times.append(perf_counter())
                if times[-1] - times[0] > seconds or track.clock.is_set():
                    evaluate(prepared, result)
                    break
        one = (times[-1] - times[0]) / max(1, len(times) - 1)
        leg = _PREPARATIONS * (times[0] - begun) + EVALUATIONS * (perf_counter() - times[-1])
        return Pace(_MARGIN * max(one, 1e-6), _MARGIN * leg)
    return Pace(math.inf, 0.0)


def run_stages(track: Track, start: Sequence[Runner]) -> list[Runner]:
    """Run a quarter at every learning rate, half at the best, and the rest with the better half."""
    quarter, half = math.ceil(track.rounds / 4), math.ceil(track.rounds / 2)
    runners = [track.advance(r, quarter) for r in start if not r.entrant.personal]
    if not track.clock.is_set():
        runners = _drop(runners, _choose_rates(runners, quarter))
        runners = [track.advance(r, half) for r in runners]
    if not track.clock.is_set():
        ranked = _rank(runners, half)
        most = max(FINALISTS, math.ceil(len(ranked) / 2))
        # What has been naive so far, such as fixbn before it freezes, has yet to show itself.
        same = [r.entrant.marks for r in ranked if r.entrant.strategy == BASELINE]
        kept = ranked[:most] + [r for r in ranked[most:] if r.entrant.marks in same]
        runners = [track.advance(r, track.rounds) for r in _drop(runners, kept)]
    naives = [r for r in _rank(runners, track.rounds) if r.entrant.strategy == BASELINE]
    lr = (naives or start)[0].entrant.lr
    personal = [r for r in start if r.entrant.personal and r.entrant.lr == lr]
    return runners + [track.advance(r, track.rounds) for r in personal]


def _choose_rates(runners: Sequence[Runner], rounds: int) -> list[Runner]:
    """Return each strategy at its best rate; the user's if the difference may be chance."""
    chosen = []
    for name in dict.fromkeys(runner.entrant.strategy for runner in runners):
        own = [r for r in runners if r.entrant.strategy == name and r.entrant.status == "racing"]
        if not own:
            continue
        first, best = own[0], max(own, key=lambda r: r.score(rounds))
        noise = estimate_noise((best.entrant, first.entrant), rounds)
        chosen.append(first if first.score(rounds) >= best.score(rounds) - noise else best)
    return chosen


def _rank(runners: Iterable[Runner], rounds: int) -> list[Runner]:
    """Return those that race, the best first."""
    racing = [r for r in runners if r.entrant.status == "racing"]
    return sorted(racing, key=lambda r: -r.score(rounds))


def _drop(runners: Iterable[Runner], kept: Iterable[Runner]) -> list[Runner]:
    """Take all that race and are not kept out of the race, with their states."""
    stay = {id(runner) for runner in kept}
    return [
        runner
        if id(runner) in stay or runner.entrant.status != "racing"
        else Runner(replace(runner.entrant, status="dropped"), runner.entry)
        for runner in runners
    ]


def repeat_duel(track: Track, runners: list[Runner], pace: Pace) -> list[Runner]:
    """Run naive and its best rival with further seeds while time remains."""
    ranked = [r for r in _rank(runners, track.rounds) if not r.entrant.personal]
    naives = [r for r in ranked if r.entrant.strategy == BASELINE]
    pair = [*naives[:1], *[r for r in ranked if r.entrant.strategy != BASELINE][:1]]
    found: dict[int, tuple[float, ...]] = {id(runner): () for runner in pair}
    for seed in range(track.seed + 1, track.seed + SEEDS):
        if track.clock.left < pace.estimate_seconds(track.rounds, len(pair)):
            break
        again = replace(track, seed=seed)
        fresh = [Runner(replace(r.entrant, rounds=0, marks=()), r.entry) for r in pair]
        ended = [again.advance(runner, track.rounds) for runner in fresh]
        if track.clock.is_set():
            break
        for runner, repeated in zip(pair, ended, strict=True):
            found[id(runner)] += (repeated.score(track.rounds),)  # 0 if it diverges now
    return [
        replace(r, entrant=replace(r.entrant, repeats=found[id(r)])) if id(r) in found else r
        for r in runners
    ]
