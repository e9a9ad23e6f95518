"""The loop over clients in one process; other engines replace how it trains a round's clients."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from statistics import fmean
from typing import TypeAlias

from torch import Tensor

from fednorm.attacks.adversary import apply_attack, find_tracked_layers
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Claim,
    ClientState,
    RejectedReply,
    Reply,
    ServerState,
    download_bytes,
    upload_bytes,
)
from fednorm.core.replies.plausibility import measure_length
from fednorm.core.replies.privacy import make_neutral_reply
from fednorm.core.replies.secure_sum import sum_replies
from fednorm.core.replies.validation import list_clients, sort_by_client
from fednorm.core.round import broadcast, reply_schema, server_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId, nbytes
from fednorm.engines.base import (
    NO_FAULTS,
    ClientSource,
    EngineRun,
    Faults,
    Progress,
    RoundResult,
    train_clients,
)
from fednorm.engines.client_state import ClientStateStore
from fednorm.engines.evaluation import find_median_loss
from fednorm.errors import NoUsableReplyError

log = logging.getLogger("fednorm")

KEPT_STATES = 5  # of the server, to which a round can be undone
EXPLODED = 2.0  # times the loss of the untrained model, and of the best state that is kept

# Trains the clients of a round; returns their results and the answers of their exchanges.
Train: TypeAlias = Callable[
    [Broadcast, Mapping[ClientId, ClientState], Sequence[Batches]],
    tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]],
]


class LoopEngine:
    """Trains client after client; takes every run, and defines what is exact."""

    name = "loop"

    def why_not(self, run: EngineRun) -> None:
        """Return None: this engine takes every run."""

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        return rounds(run.task, run.clients, run.rounds, start, faults=run.faults)


def rounds(
    task: Task,
    clients: ClientSource,
    count: int,
    start: Progress | None = None,
    *,
    train: Train | None = None,
    faults: Faults = NO_FAULTS,
) -> Iterator[RoundResult]:
    """Run federated rounds up to round `count`, training clients by `train`.

    A round with too few usable replies is repeated with other clients; NoUsableReplyError ends the
    run if that does not help.
    """
    state = start.state if start else task.initial_state
    client_states = ClientStateStore(faults.client_state_bytes).with_states(
        start.client_states if start else {}
    )
    runner = _RoundRunner(
        task, clients, train or partial(train_clients, task, byzantine=faults.byzantine), faults
    )
    while state.round < count:
        result = runner.run(state, client_states)
        state, client_states = result.state, result.client_states
        yield result
        del result  # or its replies would be held during the next round


@dataclass(frozen=True, slots=True)
class _Trained:
    """What the clients of a round sent, and keep."""

    batches: Sequence[Batches]
    replies: list[Reply]
    kept: Mapping[ClientId, ClientState]
    answers: Mapping[str, Tensor]  # of their exchanges


@dataclass(frozen=True, slots=True)
class _RoundRunner:
    task: Task
    clients: ClientSource
    train: Train
    faults: Faults
    registered: dict[ClientId, int] = field(default_factory=dict)  # examples of the first reply
    kept: deque[ServerState] = field(default_factory=partial(deque, maxlen=KEPT_STATES))

    def run(self, state: ServerState, client_states: ClientStateStore) -> RoundResult:
        """Run one round, again with other clients while too few answer."""
        tried: set[ClientId] = set()
        rejected: tuple[RejectedReply, ...] = ()
        dropped_out = attempt = 0
        while True:
            number = state.round + 1
            asked = self.faults.sample_clients(self.clients, number, attempt, tried)
            answering = self.faults.surviving(asked, number, attempt)
            trained = self._train(broadcast(self.task, state), client_states, answering)
            dropped_out += len(asked) - len(list_clients(trained.replies))
            try:
                result = self._merge(state, client_states, trained)
            except NoUsableReplyError as error:
                tried |= set(asked)
                if self.task.privacy or not self.faults.can_retry(self.clients, attempt, tried):
                    raise
                log.warning("%s It is repeated with other clients.", error)
                rejected += error.rejected
                attempt += 1
                continue
            if self.task.privacy:
                return _hide_clients(self.task, state, result)
            rejected += result.rejected
            return replace(result, rejected=rejected, dropped_out=dropped_out, retries=attempt)

    def _train(
        self, received: Broadcast, client_states: ClientStateStore, answering: list[ClientId]
    ) -> "_Trained":
        batches = [self.clients.batches(client, received.round) for client in answering]
        results, answers = self.train(received, client_states, batches) if batches else ([], {})
        own = sorted((reply for reply, _ in results), key=lambda reply: reply.client)
        tracked = find_tracked_layers(self.task, received)
        return _Trained(
            batches,
            replies=apply_attack(own, self.faults.adversary, received.round, tracked=tracked),
            kept={reply.client: client_state for reply, client_state in results},
            answers=answers,
        )

    def _merge(
        self, before: ServerState, client_states: ClientStateStore, trained: "_Trained"
    ) -> RoundResult:
        task, replies, batches = self.task, trained.replies, trained.batches
        if task.secure:
            return self._merge_sum(before, client_states, trained)
        claims = {own.client: self._find_claim(own) for own in batches}
        merge = partial(server_round, task, before, asked=claims, minimum=self.faults.min_replies)
        state = merge(replies)
        if self.faults.rollback:
            self.kept.append(before)
            look = partial(find_median_loss, task, client_states=trained.kept, batches=batches)
            state = _Rollback(merge, look, task.initial_state, self.kept).check(state, replies)
        gone = list_clients(state.rejected)
        for reply in replies:
            if reply.client not in gone:
                self.registered.setdefault(reply.client, reply.examples)
        exchanged = nbytes(trained.answers.values())
        return RoundResult(
            state=state,
            client_states=self._keep_states(client_states, trained, gone),
            train_loss=_mean_loss(replies, state.rejected),
            exchanges=1 + len(trained.answers),
            bytes_up=_mean_bytes(replies) + exchanged,
            bytes_down=download_bytes(broadcast(task, before)) + exchanged,
            replies=replies,
            rejected=state.rejected,
        )

    def _keep_states(
        self, client_states: ClientStateStore, trained: "_Trained", gone: Collection[ClientId]
    ) -> ClientStateStore:
        """Return the clients' states; those of an algorithm move only with replies that are used.

        A rejected client's control variate would leave that of the server, until its loss is NaN.
        """
        kept = dict(trained.kept)
        if self.task.algorithm.needs_client_state:
            for client in kept.keys() & gone:
                before = client_states.get(client, ClientState())
                kept[client] = replace(kept[client], optimizer=before.optimizer)
        return client_states.with_states(kept)

    def _merge_sum(
        self, before: ServerState, client_states: ClientStateStore, trained: "_Trained"
    ) -> RoundResult:
        """Merge the sum of the replies; nothing here depends on a single one."""
        asked = [own.client for own in trained.batches]
        minimum = self.faults.min_replies
        summed = sum_replies(self.task, before, trained.replies, asked=asked, minimum=minimum)
        state = server_round(self.task, before, [summed.reply])
        return RoundResult(
            state=replace(state, rejected=summed.rejected),
            client_states=client_states.with_states(trained.kept),
            train_loss=summed.reply.loss,
            exchanges=1,
            bytes_up=summed.bytes_up,
            bytes_down=download_bytes(broadcast(self.task, before)),
            replies=[summed.reply],
            rejected=summed.rejected,
        )

    def _find_claim(self, own: Batches) -> Claim:
        """Return what a client may claim; of remote clients no more than at their first reply."""
        measures = self.task.strategy.measures
        measured = self.clients.all_batches(own.client) if measures else None
        registered = self.registered.get(own.client)
        return self.faults.limits.find_claim(self.task, own, measured, registered)


@dataclass(frozen=True, slots=True)
class _Rollback:
    """Undoes a round after which the median of the clients' losses explodes."""

    merge: Callable[[Sequence[Reply]], ServerState]
    look: Callable[[ServerState], float]  # the median loss with a state
    untrained: ServerState
    kept: Sequence[ServerState]  # before the round, the newest last

    def check(self, merged: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Return the merged state, or that of a round without the replies that are to blame.

        If fewer than half of the replies cannot be blamed, return the newest state before it that
        is not as bad.
        """
        loss, untrained = self.look(merged), self.look(self.untrained)
        if loss <= EXPLODED * untrained:
            return merged
        limit = EXPLODED * max(untrained, min(map(self.look, self.kept)))
        if loss <= limit:
            return merged
        left, blamed = list(replies), list[RejectedReply]()
        usable = len(list_clients(replies) - list_clients(merged.rejected))
        while 2 * (len(blamed) + 1) < usable:
            tried = list(self._leave_out_each(left, list_clients((*merged.rejected, *blamed))))
            if not tried:
                break
            (found, _), state, reply = min(tried, key=lambda one: one[0])
            reason = f"with it the median loss of clients is {loss:.3g}, without it {found:.3g}"
            blamed.append(RejectedReply(reply.client, reason))
            left = [one for one in left if one is not reply]
            loss = found
            if loss <= limit:
                log.warning("round %d is repeated without %d replies.", state.round, len(blamed))
                return replace(state, rejected=sort_by_client((*merged.rejected, *blamed)))
        good = next(state for state in reversed(self.kept) if self.look(state) <= limit)
        log.warning("round %d is undone: it makes the clients' losses explode.", merged.round)
        return replace(good, round=merged.round, rejected=merged.rejected)

    def _leave_out_each(
        self, left: Sequence[Reply], gone: Collection[ClientId]
    ) -> Iterator[tuple[tuple[float, float], ServerState, Reply]]:
        """Yield the median loss and the state without each reply; of equals the longest first."""
        for reply in left:
            if reply.client not in gone:
                with suppress(NoUsableReplyError):
                    state = self.merge([one for one in left if one is not reply])
                    yield (self.look(state), -measure_length(reply.update)), state, reply


def _hide_clients(task: Task, before: ServerState, result: RoundResult) -> RoundResult:
    """Return a private round without what would tell of single clients or their number."""
    usual = make_neutral_reply(before, reply_schema(task, before))
    return replace(result, train_loss=nan, bytes_up=upload_bytes(usual), rejected=())


def _mean_bytes(replies: Sequence[Reply]) -> float:
    sizes = [upload_bytes(reply) for reply in replies if not reply.fault]
    return fmean(sizes) if sizes else 0.0


def _mean_loss(replies: Sequence[Reply], rejected: Sequence[RejectedReply]) -> float:
    gone = list_clients(rejected)
    used = [reply for reply in replies if reply.client not in gone]
    if not used:
        return nan
    return fmean((reply.loss for reply in used), (reply.examples for reply in used))
