"""One round: the client's part and the server's part. Engines call nothing else.

A calibration is a round without training: clients measure their statistics in a pass over their
data, and the server adopts them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fednorm.core.aggregation import Aggregator, combine_tensors, has_quorum
from fednorm.core.algorithm import Algorithm, CombinedReplies, LocalResult, LocalWork
from fednorm.core.layer import Exchange, NormRule, RoundContext, Solo, Statistics
from fednorm.core.messages import (
    Batches,
    Broadcast,
    Claim,
    ClientState,
    LayerStats,
    Reply,
    RunningStats,
    ServerState,
)
from fednorm.core.replies.plausibility import reject_largest, reject_outliers
from fednorm.core.replies.privacy import Privacy, release_mean
from fednorm.core.replies.validation import (
    Rejected,
    ReplySchema,
    find_state_fault,
    list_clients,
    reject_incomplete,
    validate_replies,
)
from fednorm.core.strategy import MergeInput
from fednorm.core.task import (
    Task,
    isolated_rng,
    load_state,
    select_reporting,
    snapshot,
    start_training,
)
from fednorm.core.types import ClientId
from fednorm.errors import NonFiniteLossError, NoUsableReplyError

# The clients that a round asks, or what each of them may claim.
Asked: TypeAlias = Collection[ClientId] | Mapping[ClientId, Claim]


def find_remedy(task: Task, state: ServerState) -> str:
    """Return what to try if the next round diverges: the strategy's remedy for fixed statistics."""
    fixed = task.strategy.rule(broadcast(task, state)).normalize_with == "shared"
    return task.strategy.remedy if fixed else ""


def broadcast(task: Task, state: ServerState) -> Broadcast:
    """Return the message of the server to the clients of its next round.

    >>> import fednorm
    >>> task = Task.build(
    ...     nn.BatchNorm1d(2), fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    ... )
    >>> broadcast(task, task.initial_state).round
    1
    """
    return Broadcast(replace(state, optimizer={}), task.rounds)


def client_round(
    task: Task,
    received: Broadcast,
    client_state: ClientState,
    batches: Batches,
    exchange: Exchange | None = None,
) -> tuple[Reply, ClientState]:
    """Train one client for one round; a pure function of its arguments.

    `exchange` answers strategies that exchange means within a round; without it the client is
    alone. Raises NonFiniteLossError when training diverges.

    >>> import fednorm
    >>> task = Task.build(
    ...     nn.BatchNorm1d(2), fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    ... )
    >>> batches = Batches(0, [(torch.eye(2), torch.tensor([0, 1]))], examples=2)
    >>> sent = broadcast(task, task.initial_state)
    >>> reply, client_state = client_round(task, sent, ClientState(), batches)
    >>> sorted(reply.update), list(reply.stats)
    (['bias', 'weight'], [''])
    """
    measured = _measure(task, received, client_state, batches) if task.strategy.measures else None
    load_state(task, received.state, client_state)
    context = RoundContext(exchange or Solo(), client_sizes=batches.client_sizes)
    start_round(task, received, context)
    counted = replace(batches, steps=_CountedSteps(task.algorithm, batches, context))
    with isolated_rng(batches.seed, task.model):
        trained = task.algorithm.local(_make_work(task, received, client_state, counted))
    context.step = -1  # later calls of the model belong to no step
    if not math.isfinite(trained.loss):
        raise NonFiniteLossError(batches.client, received.round, trained.loss)
    kept = ClientState(tensors=snapshot(task.layout.personal), optimizer=trained.optimizer)
    answer = make_reply(task, batches.client, trained)
    stats = answer.stats if measured is None else measured
    return replace(answer, stats=stats, round=received.round), kept


def _measure(
    task: Task, received: Broadcast, client_state: ClientState, batches: Batches
) -> Mapping[str, LayerStats]:
    """Return the layers' statistics of all the client's data, before it trains."""
    own = replace(batches, steps=batches.all_steps)
    return client_calibration(task, received, client_state, own, task.strategy.measure_rule()).stats


@dataclass(frozen=True, slots=True)
class _CountedSteps:
    """The batches of a round; iterating tells the layers the step and its weight."""

    algorithm: Algorithm
    batches: Batches
    context: RoundContext

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        context = self.context
        for step, (x, y) in enumerate(self.batches.steps):
            context.step, context.samples = step, len(y)
            context.examples = self.algorithm.examples(self.batches, len(y))
            yield x, y


def start_round(task: Task, received: Broadcast, context: RoundContext) -> None:
    """Set the round's rule in all layers of the workspace and clear their records."""
    _start_layers(task, task.strategy.rule(received), context)


def _start_layers(task: Task, rule: NormRule, context: RoundContext) -> None:
    start_training(task)
    for path, layer in task.layout.norms.items():
        layer.start_round(rule, context, path)


def _make_work(
    task: Task, received: Broadcast, client_state: ClientState, batches: Batches
) -> LocalWork:
    shared = _select_learning(task, received, task.layout.shared)
    personal = _select_learning(task, received, task.layout.personal_parameters)
    return LocalWork(
        model=task.model if task.precision == "full" else _MixedPrecision(task.model),
        loss=task.loss,
        shared=shared,
        personal=personal,
        batches=batches,
        broadcast=received,
        optimizer=client_state.optimizer,
        rates=task.rates,
        clips={n: clip for n, clip in task.clips.items() if n in shared or n in personal},
    )


def _select_learning(
    task: Task, received: Broadcast, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    frozen = set() if task.strategy.trains_affine(received) else set(task.layout.affine)
    return {n: p for n, p in parameters.items() if p.requires_grad and p not in frozen}


@dataclass(frozen=True, slots=True)
class _MixedPrecision:
    """A model that multiplies in bfloat16; weights, statistics and outputs keep their format."""

    model: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: Tensor = self.model(x)
        return output.float()


def make_reply(task: Task, client: ClientId, trained: LocalResult) -> Reply:
    """Return a client's reply: its update, and the statistics that the layers recorded."""
    return Reply(
        client=client,
        examples=trained.examples,
        update=trained.update,
        buffers=snapshot(task.layout.buffers),
        stats=_read_reports(task, task.strategy.statistics),
        momentum=trained.momentum,
        loss=trained.loss,
    )


def _read_reports(task: Task, statistics: Statistics) -> dict[str, LayerStats]:
    reports = {path: layer.report(statistics) for path, layer in task.layout.sharing.items()}
    return {path: report for path, report in reports.items() if report is not None}


def server_round(
    task: Task,
    state: ServerState,
    replies: Sequence[Reply],
    *,
    asked: Asked | None = None,
    minimum: int = 1,
) -> ServerState:
    """Merge the replies of one round into the next state; a pure function of its arguments.

    Clients that did not answer are simply absent, and a faulty reply is rejected by name: the
    statistics are exact for those that remain. With `asked`, no other client may answer; if it is a
    mapping, none may claim more than its claim. Raises NoUsableReplyError if fewer than `minimum`
    good replies remain, or fewer than a robust rule needs. With privacy any number is enough.

    >>> import fednorm
    >>> task = Task.build(
    ...     nn.BatchNorm1d(2), fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd")
    ... )
    >>> batches = [Batches(i, [(torch.eye(2), torch.tensor([0, 1]))], examples=2) for i in (0, 1)]
    >>> sent = broadcast(task, task.initial_state)
    >>> replies = [client_round(task, sent, ClientState(), own)[0] for own in batches]
    >>> server_round(task, task.initial_state, replies).round
    1
    """
    expected = reply_schema(task, state, asked)
    if task.privacy:
        return _merge_privately(task, task.privacy, state, replies, expected)
    good, rejected = _select_usable(task, state, replies, expected)
    while True:
        able = _count_rejected(task, good, rejected, expected)
        rules = (able.aggregator, able.statistics_aggregator)
        if len(good) < max(1, minimum) or not all(has_quorum(rule, len(good)) for rule in rules):
            raise NoUsableReplyError(state.round + 1, rejected, good=len(good))
        after = _merge_replies(able, state, good)
        if (fault := find_state_fault(after)) is None:
            return replace(after, rejected=rejected)
        good, rejected = reject_largest(good, rejected, fault)


def _merge_replies(task: Task, state: ServerState, good: Sequence[Reply]) -> ServerState:
    examples = [reply.examples for reply in good]
    combined = CombinedReplies(
        combine_tensors([r.update for r in good], examples, task.aggregator),
        combine_tensors([r.momentum for r in good], examples, task.aggregator),
        share=sum(r.clients for r in good) / task.clients if task.clients else 1.0,
        rounds=task.rounds,
        rates=task.rates,
    )
    running = _merge_layers(task, state, good, task.strategy.merge)
    return replace(
        task.algorithm.apply(state, combined),
        round=state.round + 1,
        buffers=_merge_buffers(good, task.aggregator),
        running=running,
        strategy_state=task.strategy.remember(state, running),
    )


def _merge_privately(
    task: Task,
    privacy: Privacy,
    state: ServerState,
    replies: Sequence[Reply],
    expected: ReplySchema,
) -> ServerState:
    """Merge the noisy mean of the replies; the fate of a single one is not published."""
    pools = task.strategy.statistics == "pool"
    mean = release_mean(privacy, state, replies, expected, pools=pools)
    after = _merge_replies(task, state, [mean])
    if fault := find_state_fault(after):
        raise NoUsableReplyError(after.round, (), reason=fault[1])
    return after


def reply_schema(task: Task, state: ServerState, asked: Asked | None = None) -> ReplySchema:
    """Return what a reply of the next round must hold."""
    received, strategy = broadcast(task, state), task.strategy
    update = {n: state.weights[n] for n in _select_learning(task, received, task.layout.shared)}
    records = strategy.rule(received).reports == "moments" and strategy.statistics == "pool"
    return ReplySchema(
        update=update,
        buffers=state.buffers,
        running=select_reporting(task, state) if strategy.reports(received) else {},
        momentum=task.algorithm.sends(update),
        clients=None if asked is None else frozenset(asked),
        claims=asked if isinstance(asked, Mapping) else {},
        counts_values=strategy.measures or records,
        combined=task.secure,
        ranges=task.algorithm.find_ranges,
        round=received.round,
    )


def _select_usable(
    task: Task, state: ServerState, replies: Sequence[Reply], expected: ReplySchema
) -> tuple[list[Reply], Rejected]:
    """Sort replies into those that can be merged and rejected ones."""
    good, rejected = validate_replies(replies, expected)
    if not task.statistics_aggregator.uses_weights:
        good, rejected = reject_incomplete(good, rejected)
    if task.outlier_factor and len(good) > 1:
        good, rejected = reject_outliers(task, state, good, rejected)
    return good, rejected


def _count_rejected(
    task: Task, good: Sequence[Reply], rejected: Rejected, expected: ReplySchema
) -> Task:
    """Return the task with rules for the replies that are left: rejected ones count as Byzantine.

    Those of clients that were not asked do not count.
    """
    faulty = len((list_clients(rejected) & (expected.clients or set())) - list_clients(good))
    return replace(
        task,
        aggregator=task.aggregator.without(faulty),
        statistics_aggregator=task.statistics_aggregator.without(faulty),
    )


def _merge_buffers(replies: Sequence[Reply], aggregate: Aggregator) -> dict[str, Tensor]:
    """Aggregate buffers; one on which all clients agree stays as it is, to the bit."""
    merged = combine_tensors([r.buffers for r in replies], [r.examples for r in replies], aggregate)
    first = replies[0].buffers
    agreed = {n for n in merged if all(torch.equal(r.buffers[n], first[n]) for r in replies)}
    return {name: first[name] if name in agreed else value for name, value in merged.items()}


def _merge_layers(
    task: Task,
    state: ServerState,
    replies: Sequence[Reply],
    merge: Callable[[RunningStats, MergeInput], RunningStats],
) -> dict[str, RunningStats]:
    """Return all running statistics; those of which too few clients report stay as they are."""
    running = dict(state.running)
    for path, before in state.running.items():
        heard = [r for r in replies if path in r.stats and r.stats[path].moments.count > 0]
        if has_quorum(task.statistics_aggregator, len(heard)):
            reported = MergeInput(
                reports=[reply.stats[path].with_weight(reply.examples) for reply in heard],
                examples=[reply.examples for reply in heard],
                aggregator=task.statistics_aggregator,
                layer=task.layout.sharing[path],
            )
            running[path] = merge(before, reported)
    return running


@torch.no_grad()
def client_calibration(
    task: Task, received: Broadcast, client_state: ClientState, batches: Batches, rule: NormRule
) -> Reply:
    """Pass a client's batches through the received model; reply with what its layers saw.

    Labels are ignored.
    """
    load_state(task, received.state, client_state)
    context = RoundContext()
    _start_layers(task, rule, context)
    with isolated_rng(batches.seed, task.model):
        for x, _ in batches.steps:
            context.samples = len(x)
            task.model(x)
    return Reply(batches.client, batches.examples, {}, {}, _read_reports(task, "pool"))


def server_calibration(
    task: Task, state: ServerState, replies: Sequence[Reply], *, asked: Asked | None = None
) -> ServerState:
    """Let the strategy adopt the clients' statistics; a faulty reply is rejected by name.

    With `asked`, no other client may answer, as in `server_round`.
    """
    expected = ReplySchema(
        {},
        running=select_reporting(task, state),
        clients=None if asked is None else frozenset(asked),
        claims=asked if isinstance(asked, Mapping) else {},
        combined=task.secure,
    )
    good, rejected = _select_usable(task, state, replies, expected)
    while True:
        able = _count_rejected(task, good, rejected, expected)
        after = replace(state, running=_merge_layers(able, state, good, task.strategy.adopt))
        if (fault := find_state_fault(after)) is None:
            return replace(after, rejected=rejected)
        good, rejected = reject_largest(good, rejected, fault)
