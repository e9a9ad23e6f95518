"""One run from the first round to the last, with its evaluations."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from fednorm.attacks import Backdoor
from fednorm.core.messages import Memory, Rejected, ServerState
from fednorm.core.round import NonFiniteLossError, NoUsableReplyError
from fednorm.core.task import export
from fednorm.core.types import ClientId
from fednorm.engines.adapt import newcomer
from fednorm.engines.evaluate import Score, is_personal, score, score_clients, score_global
from fednorm.engines.simulate import Round, Start
from fednorm.engines.survey import Way, surveyed
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.diagnostics import Diagnosis, Diagnostics
from fednorm.experiment.prepare import Prepared
from fednorm.experiment.result import Evaluation, RunResult, Status
from fednorm.experiment.tally import Tally

log = logging.getLogger("fednorm")


@dataclass(frozen=True, slots=True)
class Event:
    """What is known after a round; `evaluation` is there when the model was tested."""

    strategy: str
    seed: int
    round: int
    train_loss: float
    rejected: tuple[Rejected, ...] = ()
    vanished: int = 0
    repeated: int = 0
    evaluation: Evaluation | None = None
    diagnostics: Diagnostics | None = None


OnRound = Callable[[Event], None]


class Saving(Protocol):
    """Where a run is saved while it goes on."""

    def after(self, result: Round, tally: Tally) -> None:
        """Save if it is time."""
        ...

    def save(self, result: Round, tally: Tally) -> None:
        """Save now."""
        ...


def run(
    prepared: Prepared,
    on_round: OnRound = lambda _: None,
    *,
    saves: Saving | None = None,
    start: Checkpoint | None = None,
) -> RunResult:
    """Run all rounds, or the rest of them.

    Ctrl-C, a loss that is not finite and too few good replies end the run, but keep what is done.
    Where clients lie or vanish, too few replies say nothing of the training: the run is stopped and
    its state saved. Where none does, their replies are no numbers any more: it has diverged.
    """
    tally = Tally.read(start.record) if start else Tally()
    done: Round | None = None
    try:
        for done in _rounds(prepared, tally, start):
            _log(prepared, done)
            on_round(_event(prepared, done, tally))
            if saves:
                saves.after(done, tally)
    except NoUsableReplyError as error:
        if saves and done:
            saves.save(done, tally)
        ended: Status = "diverged" if prepared.conditions.usual else "stopped"
        return _result(prepared, tally, ended, str(error))
    except NonFiniteLossError as error:
        return _result(prepared, tally, "diverged", str(error))
    except KeyboardInterrupt:
        if saves and done:
            saves.save(done, tally)
        reached = len(tally.exchanges)
        return _result(prepared, tally, "interrupted", f"interrupted after round {reached}")
    return _result(prepared, tally, "finished")


def _rounds(prepared: Prepared, tally: Tally, start: Checkpoint | None) -> Iterator[Round]:
    """Run rounds and add them to the tally with their evaluation."""
    experiment = prepared.experiment
    diagnosis = Diagnosis(prepared) if experiment.diagnose else None
    if diagnosis and start:
        diagnosis.go_on(start.state, start.memories, start.window)
    for result in prepared.rounds(Start(start.state, start.memories) if start else None):
        number = result.state.round
        due = number % experiment.evaluation_rounds == 0 or number == experiment.rounds
        evaluation = evaluate(prepared, result) if due else None
        diagnostics = diagnosis.of(result, gradient=due) if diagnosis else None
        tally.add(result, evaluation, diagnostics, sends=not prepared.entry.centralized)
        tally.window = diagnosis.window if diagnosis else {}
        kept = replace(result, replies=())  # nobody needs them any more, and they are large
        del result
        yield kept


def _log(prepared: Prepared, result: Round) -> None:
    for one in result.rejected:
        log.info(
            "%s, seed %d, round %d: the reply of client %d is rejected: %s.",
            prepared.entry.title,
            prepared.seed,
            result.state.round,
            one.client,
            one.reason,
        )


def _event(prepared: Prepared, result: Round, tally: Tally) -> Event:
    number, last = result.state.round, tally.history[-1] if tally.history else None
    return Event(
        strategy=prepared.entry.title,
        seed=prepared.seed,
        round=number,
        train_loss=result.train_loss,
        rejected=result.rejected,
        vanished=result.vanished,
        repeated=result.repeated,
        evaluation=last if last and last.round == number else None,
        diagnostics=tally.diagnostics[-1] if prepared.experiment.diagnose else None,
    )


def _result(
    prepared: Prepared, tally: Tally, status: Status, error: str | None = None
) -> RunResult:
    return tally.result(
        status,
        error,
        strategy=prepared.entry.title,
        seed=prepared.seed,
        personal=personal(prepared),
        metric=prepared.data.metric,
        tested=len(prepared.data.y_test),
    )


def evaluate(prepared: Prepared, result: Round) -> Evaluation:
    """Test the global model where there is one, and every client's where there is none."""
    task, data, experiment = prepared.task, prepared.data, prepared.experiment
    state = surveyed(task, result.state, result.memories, prepared.clients, _way(prepared))
    evaluation = Evaluation(state.round, 0.0, 0.0, result.train_loss)
    if personal(prepared):
        scores = _scores(prepared, state, result.memories, honest(prepared))
        mean = (fmean(s.accuracy for s in scores), fmean(s.loss for s in scores))
        evaluation = _per_client(evaluation, scores, *mean)
    else:
        found = score_global(task, state, data.test_batches())
        evaluation = replace(evaluation, accuracy=found.accuracy, loss=found.loss)
        if experiment.evaluate == "clients":
            scores = _scores(prepared, state, {}, honest(prepared))
            evaluation = _per_client(evaluation, scores, found.accuracy, found.loss)
    success = attack_success(prepared, state, result.memories)
    evaluation = replace(evaluation, attack_success=success)
    if not experiment.unseen:
        return evaluation
    start = newcomer(result.memories) if experiment.newcomers == "average" else Memory()
    strangers = range(len(prepared.federation.all()), experiment.clients)
    scores = _scores(prepared, state, dict.fromkeys(strangers, start), strangers)
    return replace(evaluation, unseen=fmean(s.accuracy for s in scores) if scores else None)


def honest(prepared: Prepared) -> list[ClientId]:
    """Return whose models are tested: what a Byzantine client ends with is of no interest."""
    liars = prepared.conditions.byzantine
    return [client for client in prepared.federation.all() if client not in liars]


def attack_success(
    prepared: Prepared, state: ServerState, memories: Mapping[ClientId, Memory]
) -> float | None:
    """Return how often a backdoor's patch makes the model see the attacker's class.

    Where models are personal it is the mean over honest clients, each on all test images.
    """
    adversary, world = prepared.conditions.adversary, prepared.world
    attack = adversary.attack if adversary else None
    if not isinstance(attack, Backdoor) or world is None:
        return None
    task, data = prepared.task, prepared.data
    own = [memories.get(c) for c in honest(prepared)] if personal(prepared) else [None]
    models = (export(task, state, memory) for memory in own)
    scores = [score(m, attack.triggered(data.test_batches(), world), task.loss) for m in models]
    return fmean(found.accuracy for found in scores if found) if any(scores) else None


def _way(prepared: Prepared) -> Way:
    """Return how answers of a survey come to the server."""
    ask = prepared.remote.ask if prepared.remote else None
    return Way(prepared.conditions.adversary, ask)


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
    trained = [client for client in clients if client in data.all()]
    if prepared.remote and trained:  # their data and their memories are elsewhere
        return prepared.remote.scores(prepared.task, state, trained, adapt)
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
