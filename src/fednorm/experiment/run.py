"""One run from the first round to the last, with its evaluations."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from fednorm.attacks.simple import Backdoor
from fednorm.core.messages import Batches, ClientState, ServerState
from fednorm.core.replies.secure_sum import FEWEST
from fednorm.core.round import broadcast, find_remedy
from fednorm.core.task import Task, export, select_reporting
from fednorm.core.types import ClientId
from fednorm.data import Dataset
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
from fednorm.engines.base import Progress, RoundResult
from fednorm.engines.evaluation import (
    Score,
    Transport,
    calibrate_for_test,
    initial_client_state,
    is_personal,
    score,
    score_clients,
    score_global,
)
from fednorm.errors import CallbackError, FednormError, NonFiniteLossError, NoUsableReplyError
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.callbacks.base import UNWATCHED, Monitor
from fednorm.experiment.checkpoint import Checkpoint, RunRecorder
from fednorm.experiment.diagnostics import Diagnosis
from fednorm.experiment.results import Evaluation, Event, RunResult, Status

log = logging.getLogger("fednorm")

_CUT_SHORT = {"diverged", "stopped"}  # in mid-round


class Checkpointer(Protocol):
    """Where a run is saved while it trains."""

    def after(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Save if it is time."""

    def save(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Save now."""

    def end(self, result: RoundResult, recorder: RunRecorder, status: Status) -> None:
        """Note the last round of a run that has come to its end."""


@dataclass
class LastRound:
    """Holds the last round instead of saving it."""

    round: RoundResult | None = None

    def after(self, result: RoundResult, recorder: RunRecorder) -> None:
        """Hold a round."""
        del recorder
        self.round = result

    save = after

    def end(self, result: RoundResult, recorder: RunRecorder, status: Status) -> None:
        """Hold the last round."""
        del recorder, status
        self.round = result


def run(
    prepared: PreparedRun,
    monitor: Monitor = UNWATCHED,
    *,
    saves: Checkpointer | None = None,
    start: Checkpoint | None = None,
) -> RunResult:
    """Run all rounds, or those after `start`.

    Callbacks, the monitor's flag, Ctrl-C, a loss that is not finite and too few usable replies end
    the run and keep what is done; so does a callback that fails, whose error is raised. With
    Byzantine clients, dropouts or nodes, too few replies say nothing about the training: the run is
    stopped and its state saved. Otherwise the replies are not finite any more: it has diverged.
    """
    recorder = RunRecorder.read(start.record) if start else RunRecorder()
    done: RoundResult | None = None

    def finish(status: Status, error: str | None = None) -> RunResult:
        if saves and done:
            _save_end(saves, done, recorder, status)
        return _make_result(prepared, recorder, status, error)

    try:
        for done, event in _run_rounds(prepared, recorder, start):
            _log(prepared, done)
            if ended := monitor.report(event):
                _test_last(prepared, recorder, done)
                return replace(finish("stopped early"), stopped_by=ended)
            if monitor.stopped:
                return finish("interrupted", f"interrupted after round {event.round}")
            if saves:
                saves.after(done, recorder)
    except (NoUsableReplyError, NonFiniteLossError) as error:
        return finish(*_judge_failure(prepared, error, done or start))
    except KeyboardInterrupt:
        return finish("interrupted", f"interrupted after round {len(recorder.exchanges)}")
    except CallbackError:
        finish("interrupted")
        raise
    return finish("finished")


def _save_end(
    saves: Checkpointer, done: RoundResult, recorder: RunRecorder, status: Status
) -> None:
    if status in {"stopped", "interrupted"}:
        saves.save(done, recorder)
    elif status != "diverged":
        saves.end(done, recorder, status)


def _judge_failure(
    prepared: PreparedRun, error: FednormError, reached: Progress | None
) -> tuple[Status, str]:
    """Return whether a run has diverged or was stopped, and what to say of it."""
    faulty = prepared.remote or not prepared.faults.faultless
    if isinstance(error, NoUsableReplyError) and faulty:
        return "stopped", str(error)
    remedy = find_remedy(prepared.task, reached.state if reached else prepared.task.initial_state)
    if not remedy and isinstance(error, NoUsableReplyError):  # the other error names it
        remedy = NonFiniteLossError.REMEDY
    return "diverged", f"{error} {remedy}".rstrip()


def _test_last(prepared: PreparedRun, recorder: RunRecorder, done: RoundResult) -> None:
    """Record a test of the model after the last round, unless there was one."""
    tested = recorder.history and recorder.history[-1].round == done.state.round
    if not tested and (last := evaluate(prepared, done)):
        recorder.history.append(last)


def _run_rounds(
    prepared: PreparedRun, recorder: RunRecorder, start: Checkpoint | None
) -> Iterator[tuple[RoundResult, Event]]:
    """Run rounds and record them with their evaluations."""
    experiment = prepared.experiment
    diagnosis = Diagnosis(prepared) if experiment.diagnose else None
    if diagnosis and start:
        diagnosis.resume(start.state, start.client_states, start.window)
    frozen = has_frozen_statistics(
        prepared.task, start.state if start else prepared.task.initial_state
    )
    sends = not prepared.entry.centralized  # one machine that holds everything sends nothing
    for result in prepared.rounds(start):
        number = result.state.round
        due = number % experiment.evaluation_rounds == 0 or number == experiment.rounds
        tested = find_tested_state(prepared, result) if due else None
        tests = evaluate(prepared, replace(result, tested=tested)) if due else None
        # Answers to a calibration or an evaluation may have been rejected as well.
        rejected = tested.rejected if tested and tested is not result.state else ()
        rejected += prepared.remote.get_link().take_rejections() if prepared.remote else ()
        event = Event(
            strategy=prepared.entry.title,
            seed=prepared.seed,
            round=number,
            train_loss=result.train_loss,
            exchanges=result.exchanges * sends,
            bytes_up=result.bytes_up * sends,
            bytes_down=result.bytes_down * sends,
            rejected=(*result.rejected, *rejected),
            dropped_out=result.dropped_out,
            retries=result.retries,
            evaluation=tests,
            metric=prepared.data.metric,
            diagnostics=diagnosis.measure_round(result, gradient=due) if diagnosis else None,
        )
        recorder.add(event)
        recorder.window = diagnosis.window if diagnosis else {}
        was, frozen = frozen, has_frozen_statistics(prepared.task, result.state)
        if frozen and not was and number < experiment.rounds:
            recorder.frozen_from = number + 1
        # The replies are large, and not needed any more.
        kept = replace(result, replies=(), tested=tested)
        del result
        yield kept, event


def has_frozen_statistics(task: Task, state: ServerState) -> bool:
    """Return whether the next round normalises with statistics that no client reports anew."""
    rule = task.strategy.rule(broadcast(task, state))
    return rule.normalize_with == "shared" and rule.reports == "nothing"


def _log(prepared: PreparedRun, result: RoundResult) -> None:
    where = (prepared.entry.title, prepared.seed, result.state.round)
    text = "%s, seed %d, round %d: the reply of client %d is rejected: %s."
    for one in result.rejected:
        log.info(text, *where, one.client, one.reason)


def _make_result(
    prepared: PreparedRun, recorder: RunRecorder, status: Status, error: str | None = None
) -> RunResult:
    return recorder.result(
        status,
        error,
        strategy=prepared.entry.title,
        seed=prepared.seed,
        personal=has_personal_models(prepared),
        conversion=prepared.task.conversion_notes,
        metric=prepared.data.metric,
        tested=len(prepared.data.y_test),
        # How a run ended is an outcome of the round that it did not finish.
        **_find_guarantee(prepared, len(recorder.exchanges) + (status in _CUT_SHORT)),
    )


def _find_guarantee(prepared: PreparedRun, rounds: int) -> dict[str, float | None]:
    """Return ε and δ of the rounds so far, if the run is private."""
    task = prepared.task
    if task.privacy is None:
        return {}
    statistics = bool(select_reporting(task, task.initial_state))
    epsilon = task.privacy.find_epsilon(rounds, statistics=statistics)
    return {"epsilon": epsilon, "delta": task.privacy.delta}


def find_tested_state(prepared: PreparedRun, reached: Progress) -> ServerState:
    """Return the state that is tested; a strategy may calibrate its statistics first."""
    ask = prepared.remote.get_link().ask if prepared.remote else None
    transport = Transport(prepared.faults.adversary, ask, prepared.faults.limits)
    return calibrate_for_test(
        prepared.task, reached.state, reached.client_states, prepared.clients, transport
    )


def evaluate(prepared: PreparedRun, result: RoundResult) -> Evaluation | None:
    """Test the global model if there is one, else every client's model.

    Return None if no client could be tested, because all nodes are gone.
    """
    task, experiment, states = prepared.task, prepared.experiment, result.client_states
    state = result.tested or find_tested_state(prepared, result)
    initial = make_initial_state(prepared, states)
    trained: dict[ClientId, Score] = {}
    untrained: dict[ClientId, Score] = {}
    if has_personal_models(prepared):
        trained, untrained = _score_personal(prepared, state, states, initial)
        own = [found for _, found in sorted({**trained, **untrained}.items())]
        if not own:
            log.warning("no client could be tested after round %d.", state.round)
            return None
        accuracy, loss = fmean(s.accuracy for s in own), fmean(s.loss for s in own)
        named = _average_metrics(own)
    else:
        found = score_global(task, state, prepared.data.test_batches())
        accuracy, loss, named = found.accuracy, found.loss, dict(found.metrics)
        tested = list_honest(prepared) if experiment.evaluate == "clients" else []
        own = list(_score_clients(prepared, state, {}, tested).values())
    single = [] if task.secure else [found.accuracy for found in own]
    fewest = FEWEST if task.secure else 1
    unseen = range(len(prepared.federation.all()), experiment.clients)
    return Evaluation(
        round=state.round,
        accuracy=accuracy,
        loss=loss,
        train_loss=result.train_loss,
        per_client=tuple(single) or None,
        worst=min(single, default=None),
        weighted=_weigh_by_examples(own),
        trained=_mean_accuracy(trained, fewest) if untrained else None,
        untrained=_mean_accuracy(untrained, fewest),
        unseen=_mean_accuracy(
            _score_clients(prepared, state, dict.fromkeys(unseen, initial), unseen), fewest
        ),
        attack_success=measure_attack_success(prepared, state, states, initial),
        metrics=named or None,
    )


def _average_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean over clients of each of the user's metrics."""
    return {name: fmean(s.metrics[name] for s in scores) for name in scores[0].metrics}


def make_initial_state(
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
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    initial: ClientState,
) -> tuple[dict[ClientId, Score], dict[ClientId, Score]]:
    """Test the honest clients' models: those that have trained, and the rest with `initial`."""
    keeps = is_personal(prepared.task)
    tested = list_honest(prepared)
    new = [client for client in tested if keeps and client not in client_states]
    trained = [client for client in tested if client not in new]
    if prepared.remote and prepared.experiment.unseen_init == "average":
        new = []  # personal layers stay on their nodes, so there is no mean of them
    return (
        _score_clients(prepared, state, client_states, trained),
        _score_clients(prepared, state, dict.fromkeys(new, initial), new),
    )


def _weigh_by_examples(scores: Collection[Score]) -> float | None:
    examples = sum(s.examples for s in scores)
    return sum(s.accuracy * s.examples for s in scores) / examples if scores else None


def _mean_accuracy(scores: Mapping[ClientId, Score], fewest: int) -> float | None:
    return fmean(s.accuracy for s in scores.values()) if len(scores) >= fewest else None


def list_honest(prepared: PreparedRun) -> list[ClientId]:
    """Return the clients whose models are tested: all but the Byzantine ones."""
    byzantine = prepared.faults.byzantine
    return [client for client in prepared.federation.all() if client not in byzantine]


def measure_attack_success(
    prepared: PreparedRun,
    state: ServerState,
    client_states: Mapping[ClientId, ClientState],
    initial: ClientState,
) -> float | None:
    """Return how often a backdoor's patch makes the model predict the attacker's class.

    Of personal models it is the mean over honest clients, each on all test images; one that has not
    trained yet has the layers of `initial`.
    """
    adversary, data_info = prepared.faults.adversary, prepared.data_info
    attack = adversary.attack if adversary else None
    if not isinstance(attack, Backdoor) or data_info is None:
        return None
    task, data = prepared.task, prepared.data
    tested: list[ClientId | None] = (
        [*list_honest(prepared)] if has_personal_models(prepared) else [None]
    )
    own = (None if client is None else client_states.get(client, initial) for client in tested)
    models = (export(task, state, client_state) for client_state in own)
    scores = [
        score(m, attack.add_trigger(data.test_batches(), data_info), task.loss) for m in models
    ]
    return fmean(found.accuracy for found in scores if found) if any(scores) else None


def has_personal_models(prepared: PreparedRun) -> bool:
    """Return whether each client is tested with its own model."""
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
    if prepared.remote and here:  # whose data and states are elsewhere
        return prepared.remote.get_link().score_clients(state, here, adapt)
    everywhere = has_personal_models(prepared) and prepared.experiment.evaluate == "global"
    tested = AllTestSamples(data, prepared.data) if everywhere else data
    return score_clients(prepared.task, state, client_states, tested, clients, adapt=adapt)


@dataclass(frozen=True, slots=True)
class AllTestSamples:
    """Clients that are tested on all test samples, as a global model is."""

    federation: Federation
    data: Dataset

    def test(self, client: ClientId) -> Iterable[Batch]:  # noqa: ARG002 (the same for all)
        """Return all test samples, in batches."""
        return self.data.test_batches()

    def all_batches(self, client: ClientId) -> Batches:
        """Return all of a client's training data once, in batches."""
        return self.federation.all_batches(client)
