"""One run from the first round to the last, with its evaluations."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from fednorm.core.messages import Memory, ServerState
from fednorm.core.round import NonFiniteLossError, NoUsableReplyError
from fednorm.core.types import ClientId
from fednorm.engines.adapt import newcomer
from fednorm.engines.evaluate import Score, is_personal, score_clients, score_global
from fednorm.engines.simulate import Round
from fednorm.engines.survey import surveyed
from fednorm.experiment.diagnostics import Diagnosis, Diagnostics
from fednorm.experiment.prepare import Prepared
from fednorm.experiment.result import Evaluation, RunResult, Status


@dataclass(frozen=True, slots=True)
class Event:
    """What is known after a round; `evaluation` is there when the model was tested."""

    strategy: str
    seed: int
    round: int
    train_loss: float
    rejected: tuple[str, ...] = ()
    evaluation: Evaluation | None = None
    diagnostics: Diagnostics | None = None


OnRound = Callable[[Event], None]


def run(prepared: Prepared, on_round: OnRound = lambda _: None) -> RunResult:
    """Run all rounds; Ctrl-C and a loss that is not finite end the run, but keep what is done."""
    tally = _Tally(prepared, time.perf_counter())
    experiment = prepared.experiment
    diagnosis = Diagnosis(prepared) if experiment.diagnose else None
    try:
        for result in prepared.rounds():
            number = result.state.round
            due = number % experiment.evaluation_rounds == 0 or number == experiment.rounds
            evaluation = evaluate(prepared, result) if due else None
            diagnostics = diagnosis.of(result, gradient=due) if diagnosis else None
            on_round(tally.add(result, evaluation, diagnostics))
    except (NonFiniteLossError, NoUsableReplyError) as error:
        return tally.result("diverged", str(error))
    except KeyboardInterrupt:
        return tally.result("interrupted", f"interrupted after round {len(tally.exchanges)}")
    return tally.result("finished")


def evaluate(prepared: Prepared, result: Round) -> Evaluation:
    """Test the global model where there is one, and every client's where there is none."""
    task, data, experiment = prepared.task, prepared.data, prepared.experiment
    state = surveyed(task, result.state, result.memories, prepared.clients)
    evaluation = Evaluation(state.round, 0.0, 0.0, result.train_loss)
    if personal(prepared):
        scores = _scores(prepared, state, result.memories, prepared.federation.all())
        mean = (fmean(s.accuracy for s in scores), fmean(s.loss for s in scores))
        evaluation = _per_client(evaluation, scores, *mean)
    else:
        score = score_global(task, state, data.test_batches())
        evaluation = replace(evaluation, accuracy=score.accuracy, loss=score.loss)
        if experiment.evaluate == "clients":
            scores = _scores(prepared, state, {}, prepared.federation.all())
            evaluation = _per_client(evaluation, scores, score.accuracy, score.loss)
    if not experiment.unseen:
        return evaluation
    start = newcomer(result.memories) if experiment.newcomers == "average" else Memory()
    strangers = range(len(prepared.federation.all()), experiment.clients)
    scores = _scores(prepared, state, dict.fromkeys(strangers, start), strangers)
    return replace(evaluation, unseen=fmean(s.accuracy for s in scores) if scores else None)


def personal(prepared: Prepared) -> bool:
    """Return whether every client is tested with a model of its own."""
    adapted = prepared.experiment.adapt > 0 and bool(prepared.task.layout.norms)
    return is_personal(prepared.task) or adapted


def _scores(
    prepared: Prepared,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    clients: Iterable[ClientId],
) -> list[Score]:
    data, adapt = prepared.federation, prepared.experiment.adapt
    return score_clients(prepared.task, state, memories, data, clients, adapt=adapt)


def _per_client(
    evaluation: Evaluation, scores: list[Score], accuracy: float, loss: float
) -> Evaluation:
    accuracies = tuple(s.accuracy for s in scores)
    examples = sum(s.examples for s in scores)
    return replace(
        evaluation,
        accuracy=accuracy,
        loss=loss,
        per_client=accuracies,
        worst=min(accuracies),
        weighted=sum(s.accuracy * s.examples for s in scores) / examples,
    )


class _Tally:
    """Collects the rounds of a run into its result."""

    def __init__(self, prepared: Prepared, start: float) -> None:
        self.prepared, self.start = prepared, start
        self.history: list[Evaluation] = []
        self.exchanges: list[int] = []
        self.up: list[float] = []
        self.down: list[float] = []
        self.diagnostics: list[Diagnostics] = []
        self.rejected = 0

    def add(
        self, result: Round, evaluation: Evaluation | None, diagnostics: Diagnostics | None
    ) -> Event:
        """Add a round."""
        sends = not self.prepared.entry.centralized  # one machine sends nothing to anybody
        self.exchanges.append(result.exchanges * sends)
        self.up.append(result.bytes_up * sends)
        self.down.append(result.bytes_down * sends)
        self.rejected += len(result.state.rejected)
        if evaluation is not None:
            self.history.append(evaluation)
        if diagnostics is not None:
            self.diagnostics.append(diagnostics)
        return Event(
            strategy=self.prepared.entry.title,
            seed=self.prepared.seed,
            round=result.state.round,
            train_loss=result.train_loss,
            rejected=tuple(f"client {r.client}: {r.reason}" for r in result.state.rejected),
            evaluation=evaluation,
            diagnostics=diagnostics,
        )

    def result(self, status: Status, error: str | None = None) -> RunResult:
        """Return what there is."""
        mean = {name: fmean(values) if values else 0.0 for name, values in self._series().items()}
        return RunResult(
            strategy=self.prepared.entry.title,
            seed=self.prepared.seed,
            status=status,
            history=tuple(self.history),
            rounds=len(self.exchanges),
            exchanges_per_round=mean["exchanges"],
            bytes_up_per_round=mean["up"],
            bytes_down_per_round=mean["down"],
            seconds=time.perf_counter() - self.start,
            personal=personal(self.prepared),
            rejected=self.rejected,
            error=error,
            diagnostics=tuple(self.diagnostics),
            metric=self.prepared.data.metric,
        )

    def _series(self) -> dict[str, list[float]]:
        return {"exchanges": [float(e) for e in self.exchanges], "up": self.up, "down": self.down}
