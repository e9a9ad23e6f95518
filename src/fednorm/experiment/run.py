"""One run from the first round to the last, with its evaluations."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from fednorm.attacks import Backdoor
from fednorm.core.messages import Batches, ClientState, RejectedReply, ServerState
from fednorm.core.task import export
from fednorm.core.types import ClientId
from fednorm.data import Dataset
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
from fednorm.engines.evaluation import Score, is_personal, score, score_clients, score_global
from fednorm.engines.evaluation_statistics import (
    Transport,
    calibrate_for_test,
    initial_client_state,
)
from fednorm.engines.loop import RoundResult, Start
from fednorm.errors import NonFiniteLossError, NoUsableReplyError
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.diagnostics import Diagnosis, Diagnostics
from fednorm.experiment.prepare import PreparedRun
from fednorm.experiment.results import Evaluation, RunRecorder, RunResult, Status

log = logging.getLogger("fednorm")


@dataclass(frozen=True, slots=True)
class Event:
    """What is known after a round; `evaluation` is there when the model was tested."""

    strategy: str
    seed: int
    round: int
    train_loss: float
    rejected: tuple[RejectedReply, ...] = ()
    dropped_out: int = 0
    retries: int = 0
    evaluation: Evaluation | None = None
    diagnostics: Diagnostics | None = None


OnRound = Callable[[Event], None]


class Checkpointer(Protocol):
    """Where a run is saved while it goes on."""

    def after(self, result: RoundResult, tally: RunRecorder) -> None:
        """Save if it is time."""
        ...

    def save(self, result: RoundResult, tally: RunRecorder) -> None:
        """Save now."""
        ...


def run(
    prepared: PreparedRun,
    on_round: OnRound = lambda _: None,
    *,
    saves: Checkpointer | None = None,
    start: Checkpoint | None = None,
) -> RunResult:
    """Run all rounds, or the rest of them.

    Ctrl-C, a loss that is not finite and too few good replies end the run, but keep what is done.
    Where clients lie or vanish, too few replies say nothing of the training: the run is stopped and
    its state saved. Where none does, their replies are no numbers any more: it has diverged.
    """
    tally = RunRecorder.read(start.record) if start else RunRecorder()
    done: RoundResult | None = None
    try:
        for done in _run_rounds(prepared, tally, start):
            _log(prepared, done)
            on_round(_make_event(prepared, done, tally))
            if saves:
                saves.after(done, tally)
    except NoUsableReplyError as error:
        if saves and done:
            saves.save(done, tally)
        ended: Status = "diverged" if prepared.conditions.faultless else "stopped"
        return _make_result(prepared, tally, ended, str(error))
    except NonFiniteLossError as error:
        return _make_result(prepared, tally, "diverged", str(error))
    except KeyboardInterrupt:
        if saves and done:
            saves.save(done, tally)
        reached = len(tally.exchanges)
        return _make_result(prepared, tally, "interrupted", f"interrupted after round {reached}")
    return _make_result(prepared, tally, "finished")


def _run_rounds(
    prepared: PreparedRun, tally: RunRecorder, start: Checkpoint | None
) -> Iterator[RoundResult]:
    """Run rounds and add them to the tally with their evaluation."""
    experiment = prepared.experiment
    diagnosis = Diagnosis(prepared) if experiment.diagnose else None
    if diagnosis and start:
        diagnosis.resume(start.state, start.client_states, start.window)
    for result in prepared.rounds(Start(start.state, start.client_states) if start else None):
        number = result.state.round
        due = number % experiment.evaluation_rounds == 0 or number == experiment.rounds
        tested = find_tested_state(prepared, result) if due else None
        evaluation = evaluate(prepared, replace(result, tested=tested)) if due else None
        diagnostics = diagnosis.measure_round(result, gradient=due) if diagnosis else None
        tally.add(result, evaluation, diagnostics, sends=not prepared.entry.centralized)
        tally.window = diagnosis.window if diagnosis else {}
        # Nobody needs the replies any more, and they are large.
        kept = replace(result, replies=(), tested=tested)
        del result
        yield kept


def _log(prepared: PreparedRun, result: RoundResult) -> None:
    for one in result.rejected:
        log.info(
            "%s, seed %d, round %d: the reply of client %d is rejected: %s.",
            prepared.entry.title,
            prepared.seed,
            result.state.round,
            one.client,
            one.reason,
        )


def _make_event(prepared: PreparedRun, result: RoundResult, tally: RunRecorder) -> Event:
    number, last = result.state.round, tally.history[-1] if tally.history else None
    return Event(
        strategy=prepared.entry.title,
        seed=prepared.seed,
        round=number,
        train_loss=result.train_loss,
        rejected=result.rejected,
        dropped_out=result.dropped_out,
        retries=result.retries,
        evaluation=last if last and last.round == number else None,
        diagnostics=tally.diagnostics[-1] if prepared.experiment.diagnose else None,
    )


def _make_result(
    prepared: PreparedRun, tally: RunRecorder, status: Status, error: str | None = None
) -> RunResult:
    return tally.result(
        status,
        error,
        strategy=prepared.entry.title,
        seed=prepared.seed,
        personal=has_personal_models(prepared),
        metric=prepared.data.metric,
        tested=len(prepared.data.y_test),
    )


def find_tested_state(prepared: PreparedRun, reached: RoundResult | Checkpoint) -> ServerState:
    """Return the state that is tested: strategies may take the statistics anew for it."""
    task, clients = prepared.task, prepared.clients
    return calibrate_for_test(
        task, reached.state, reached.client_states, clients, _make_transport(prepared)
    )


def evaluate(prepared: PreparedRun, result: RoundResult) -> Evaluation:
    """Test the global model where there is one, and every client's where there is none."""
    task, data, experiment = prepared.task, prepared.data, prepared.experiment
    state = result.tested or find_tested_state(prepared, result)
    evaluation = Evaluation(state.round, 0.0, 0.0, result.train_loss)
    start = _make_initial_state(prepared, result.client_states)
    if has_personal_models(prepared):
        evaluation = _score_personal(prepared, evaluation, state, result.client_states, start)
    else:
        found = score_global(task, state, data.test_batches())
        evaluation = replace(evaluation, accuracy=found.accuracy, loss=found.loss)
        if experiment.evaluate == "clients":
            own = _score_clients(prepared, state, {}, list_honest(prepared))
            evaluation = _add_clients(evaluation, own.values(), found.accuracy, found.loss)
    success = measure_attack_success(prepared, state, result.client_states, start)
    evaluation = replace(evaluation, attack_success=success)
    if not experiment.unseen_clients:
        return evaluation
    strangers = range(len(prepared.federation.all()), experiment.clients)
    met = _score_clients(prepared, state, dict.fromkeys(strangers, start), strangers)
    return replace(evaluation, unseen=_mean_accuracy(met))


def _make_initial_state(
    prepared: PreparedRun, client_states: Mapping[ClientId, ClientState]
) -> ClientState:
    """Return the personal layers with which a client that has not trained is tested."""
    experiment = prepared.experiment
    everyone = all(client in client_states for client in range(experiment.clients))
    if everyone or experiment.unseen_init == "initial" or not prepared.task.layout.personal:
        return ClientState()
    return initial_client_state(client_states)


def _score_personal(
    prepared: PreparedRun,
    evaluation: Evaluation,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    start: ClientState,
) -> Evaluation:
    """Test every honest client's model; one that has not trained yet has the layers of `start`."""
    keeps = is_personal(prepared.task)
    tested = list_honest(prepared)
    new = [client for client in tested if keeps and client not in client_states]
    old = [client for client in tested if client not in new]
    trained = _score_clients(prepared, state, client_states, old)
    if prepared.remote and prepared.experiment.unseen_init == "average":
        new = []  # layers stay on their nodes, so that there is no mean of them
    untrained = _score_clients(prepared, state, dict.fromkeys(new, start), new)
    scores = [score for _, score in sorted({**trained, **untrained}.items())]
    mean = (fmean(s.accuracy for s in scores), fmean(s.loss for s in scores))
    evaluation = _add_clients(evaluation, scores, *mean)
    if not untrained:
        return evaluation
    return replace(evaluation, trained=_mean_accuracy(trained), untrained=_mean_accuracy(untrained))


def _mean_accuracy(scores: Mapping[ClientId, Score]) -> float | None:
    return fmean(s.accuracy for s in scores.values()) if scores else None


def list_honest(prepared: PreparedRun) -> list[ClientId]:
    """Return whose models are tested: what a Byzantine client ends with is of no interest."""
    liars = prepared.conditions.byzantine
    return [client for client in prepared.federation.all() if client not in liars]


def measure_attack_success(
    prepared: PreparedRun,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    start: ClientState,
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
    tested: list[ClientId | None] = (
        [*list_honest(prepared)] if has_personal_models(prepared) else [None]
    )
    own = (None if client is None else client_states.get(client, start) for client in tested)
    models = (export(task, state, client_state) for client_state in own)
    scores = [score(m, attack.add_trigger(data.test_batches(), world), task.loss) for m in models]
    return fmean(found.accuracy for found in scores if found) if any(scores) else None


def _make_transport(prepared: PreparedRun) -> Transport:
    """Return how answers of a survey come to the server."""
    ask = prepared.remote.ask if prepared.remote else None
    return Transport(prepared.conditions.adversary, ask)


def has_personal_models(prepared: PreparedRun) -> bool:
    """Return whether every client is tested with a model of its own."""
    adapted = prepared.experiment.adapt_statistics > 0 and bool(prepared.task.layout.norms)
    return is_personal(prepared.task) or adapted


def _score_clients(
    prepared: PreparedRun,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    clients: Sequence[ClientId],
) -> dict[ClientId, Score]:
    data, adapt = prepared.federation, prepared.experiment.adapt_statistics
    here = [client for client in clients if client in data.all()]
    if prepared.remote and here:  # their data and their memories are elsewhere
        return prepared.remote.scores(prepared.task, state, here, adapt)
    everywhere = has_personal_models(prepared) and prepared.experiment.evaluate == "global"
    tested = AllTestSamples(data, prepared.data) if everywhere else data
    return score_clients(prepared.task, state, client_states, tested, clients, adapt=adapt)


@dataclass(frozen=True, slots=True)
class AllTestSamples:
    """Clients that are tested on all test samples, those that a global model is tested on."""

    federation: Federation
    data: Dataset

    def test(self, client: ClientId) -> Iterable[Batch]:  # noqa: ARG002 (the same for all)
        """Return all test samples, in batches."""
        return self.data.test_batches()

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's training data once, in batches."""
        return self.federation.all_batches(client)


def _add_clients(
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
