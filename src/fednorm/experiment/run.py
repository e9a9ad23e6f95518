"""One run from the first round to the last, with its evaluations."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from fednorm.attacks import Backdoor
from fednorm.core.messages import Batches, Memory, Rejected, ServerState
from fednorm.core.round import NonFiniteLossError, NoUsableReplyError
from fednorm.core.task import export
from fednorm.core.types import ClientId
from fednorm.data import Dataset
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
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
        tested = find_tested_state(prepared, result) if due else None
        evaluation = evaluate(prepared, replace(result, tested=tested)) if due else None
        diagnostics = diagnosis.of(result, gradient=due) if diagnosis else None
        tally.add(result, evaluation, diagnostics, sends=not prepared.entry.centralized)
        tally.window = diagnosis.window if diagnosis else {}
        # Nobody needs the replies any more, and they are large.
        kept = replace(result, replies=(), tested=tested)
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


def find_tested_state(prepared: Prepared, reached: Round | Checkpoint) -> ServerState:
    """Return the state that is tested: strategies may take the statistics anew for it."""
    task, clients = prepared.task, prepared.clients
    return surveyed(task, reached.state, reached.memories, clients, _way(prepared))


def evaluate(prepared: Prepared, result: Round) -> Evaluation:
    """Test the global model where there is one, and every client's where there is none."""
    task, data, experiment = prepared.task, prepared.data, prepared.experiment
    state = result.tested or find_tested_state(prepared, result)
    evaluation = Evaluation(state.round, 0.0, 0.0, result.train_loss)
    start = _start(prepared, result.memories)
    if personal(prepared):
        evaluation = _personal(prepared, evaluation, state, result.memories, start)
    else:
        found = score_global(task, state, data.test_batches())
        evaluation = replace(evaluation, accuracy=found.accuracy, loss=found.loss)
        if experiment.evaluate == "clients":
            own = _scores(prepared, state, {}, honest(prepared))
            evaluation = _per_client(evaluation, own.values(), found.accuracy, found.loss)
    success = attack_success(prepared, state, result.memories, start)
    evaluation = replace(evaluation, attack_success=success)
    if not experiment.unseen:
        return evaluation
    strangers = range(len(prepared.federation.all()), experiment.clients)
    met = _scores(prepared, state, dict.fromkeys(strangers, start), strangers)
    return replace(evaluation, unseen=_mean_accuracy(met))


def _start(prepared: Prepared, memories: Mapping[ClientId, Memory]) -> Memory:
    """Return the personal layers with which a client that has not trained is tested."""
    experiment = prepared.experiment
    everyone = all(client in memories for client in range(experiment.clients))
    if everyone or experiment.newcomers == "initial" or not prepared.task.layout.personal:
        return Memory()
    return newcomer(memories)


def _personal(
    prepared: Prepared,
    evaluation: Evaluation,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    start: Memory,
) -> Evaluation:
    """Test every honest client's model; one that has not trained yet has the layers of `start`."""
    keeps = is_personal(prepared.task)
    tested = honest(prepared)
    new = [client for client in tested if keeps and client not in memories]
    old = [client for client in tested if client not in new]
    trained = _scores(prepared, state, memories, old)
    if prepared.remote and prepared.experiment.newcomers == "average":
        new = []  # layers stay on their nodes, so that there is no mean of them
    untrained = _scores(prepared, state, dict.fromkeys(new, start), new)
    scores = [score for _, score in sorted({**trained, **untrained}.items())]
    mean = (fmean(s.accuracy for s in scores), fmean(s.loss for s in scores))
    evaluation = _per_client(evaluation, scores, *mean)
    if not untrained:
        return evaluation
    return replace(evaluation, trained=_mean_accuracy(trained), untrained=_mean_accuracy(untrained))


def _mean_accuracy(scores: Mapping[ClientId, Score]) -> float | None:
    return fmean(s.accuracy for s in scores.values()) if scores else None


def honest(prepared: Prepared) -> list[ClientId]:
    """Return whose models are tested: what a Byzantine client ends with is of no interest."""
    liars = prepared.conditions.byzantine
    return [client for client in prepared.federation.all() if client not in liars]


def attack_success(
    prepared: Prepared,
    state: ServerState,
    memories: Mapping[ClientId, Memory],
    start: Memory,
) -> float | None:
    """Return how often a backdoor's patch makes the model see the attacker's class.

    Where models are personal it is the mean over honest clients, each on all test images; one that
    has not trained yet has the layers of `start`.
    """
    adversary, world = prepared.conditions.adversary, prepared.world
    attack = adversary.attack if adversary else None
    if not isinstance(attack, Backdoor) or world is None:
        return None
    task, data = prepared.task, prepared.data
    tested: list[ClientId | None] = [*honest(prepared)] if personal(prepared) else [None]
    own = (None if client is None else memories.get(client, start) for client in tested)
    models = (export(task, state, memory) for memory in own)
    scores = [score(m, attack.add_trigger(data.test_batches(), world), task.loss) for m in models]
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
    clients: Sequence[ClientId],
) -> dict[ClientId, Score]:
    data, adapt = prepared.federation, prepared.experiment.adapt
    here = [client for client in clients if client in data.all()]
    if prepared.remote and here:  # their data and their memories are elsewhere
        return prepared.remote.scores(prepared.task, state, here, adapt)
    everywhere = personal(prepared) and prepared.experiment.evaluate == "global"
    tested = Everywhere(data, prepared.data) if everywhere else data
    return score_clients(prepared.task, state, memories, tested, clients, adapt=adapt)


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Clients that are tested on all test samples, those that a global model is tested on."""

    federation: Federation
    data: Dataset

    def test(self, client: ClientId) -> Iterable[Batch]:  # noqa: ARG002 (the same for all)
        """Return all test samples, in batches."""
        return self.data.test_batches()

    def everything(self, client: ClientId) -> Batches:
        """Return all of a client's training data once, in batches."""
        return self.federation.everything(client)


def _per_client(
    evaluation: Evaluation, scores: Collection[Score], accuracy: float, loss: float
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
