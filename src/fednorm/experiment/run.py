"""One run from the first round to the last, with its evaluations."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from fednorm.core.round import NonFiniteLossError
from fednorm.engines.evaluate import Score, is_personal, score_clients, score_global
from fednorm.engines.simulate import Round
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


OnRound = Callable[[Event], None]


def run(prepared: Prepared, on_round: OnRound = lambda _: None) -> RunResult:
    """Run all rounds; Ctrl-C and a loss that is not finite end the run, but keep what is done."""
    tally = _Tally(prepared, time.perf_counter())
    experiment = prepared.experiment
    try:
        for result in prepared.rounds():
            number = result.state.round
            due = number % experiment.evaluation_rounds == 0 or number == experiment.rounds
            evaluation = evaluate(prepared, result) if due else None
            on_round(tally.add(result, evaluation))
    except NonFiniteLossError as error:
        return tally.result("diverged", str(error))
    except KeyboardInterrupt:
        return tally.result("interrupted", f"interrupted after round {len(tally.exchanges)}")
    return tally.result("finished")


def evaluate(prepared: Prepared, result: Round) -> Evaluation:
    """Test the global model where there is one, and every client's where there is none."""
    task, state, data = prepared.task, result.state, prepared.data
    if is_personal(task):
        scores = score_clients(task, state, result.memories, prepared.federation)
        return _per_client(
            Evaluation(
                round=state.round,
                accuracy=fmean(s.accuracy for s in scores),
                loss=fmean(s.loss for s in scores),
                train_loss=result.train_loss,
            ),
            scores,
        )
    score = score_global(task, state, data.x_test, data.y_test)
    evaluation = Evaluation(state.round, score.accuracy, score.loss, result.train_loss)
    if prepared.experiment.evaluate == "global":
        return evaluation
    return _per_client(evaluation, score_clients(task, state, {}, prepared.federation))


def _per_client(evaluation: Evaluation, scores: list[Score]) -> Evaluation:
    accuracies = tuple(s.accuracy for s in scores)
    examples = sum(s.examples for s in scores)
    return replace(
        evaluation,
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
        self.rejected = 0

    def add(self, result: Round, evaluation: Evaluation | None) -> Event:
        """Add a round."""
        sends = not self.prepared.entry.centralized  # one machine sends nothing to anybody
        self.exchanges.append(result.exchanges * sends)
        self.up.append(result.bytes_up * sends)
        self.down.append(result.bytes_down * sends)
        self.rejected += len(result.state.rejected)
        if evaluation is not None:
            self.history.append(evaluation)
        return Event(
            strategy=self.prepared.entry.title,
            seed=self.prepared.seed,
            round=result.state.round,
            train_loss=result.train_loss,
            rejected=tuple(f"client {r.client}: {r.reason}" for r in result.state.rejected),
            evaluation=evaluation,
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
            personal=is_personal(self.prepared.task),
            rejected=self.rejected,
            error=error,
        )

    def _series(self) -> dict[str, list[float]]:
        return {"exchanges": [float(e) for e in self.exchanges], "up": self.up, "down": self.down}
