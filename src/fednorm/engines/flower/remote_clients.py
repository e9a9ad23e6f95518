"""The server's side of a run on nodes, which train, calibrate and evaluate.

A node that fails, is gone or is too late is missing from a round; the run continues without it. An
answer that cannot be read is a faulty reply, which the server rejects by name.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import ClassVar, TypeAlias

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fednorm.core.aggregation import has_quorum
from fednorm.core.layer import PendingError, answer_exchange
from fednorm.core.messages import (
    LARGEST,
    Batches,
    Broadcast,
    Claim,
    ClientState,
    LayerStats,
    LayerUse,
    RejectedReply,
    Reply,
    ServerState,
)
from fednorm.core.round import broadcast
from fednorm.core.targets import Metrics
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines import loop
from fednorm.engines.base import EngineRun, Progress, RoundResult
from fednorm.engines.evaluation import Score
from fednorm.engines.flower import wire
from fednorm.engines.flower.node_answers import (
    CheckedGrid,
    is_unreadable,
    read_content,
    read_reason,
)
from fednorm.engines.flower.node_app import ANSWERS, NO_CLIENT, PENDING
from fednorm.errors import ConfigError, NonFiniteLossError, NoNodesError, WireError

_ASKED = 60.0  # seconds for a node to say which partition it has
_LOOK = 0.5  # seconds between looks for nodes
_PER_CALL = 3  # exchanges of a layer: mean, variance and their gradients
log = logging.getLogger("fednorm")

OpenGrid: TypeAlias = Callable[[], AbstractContextManager[Grid]]


@dataclass
class FlowerNodes:
    """The nodes of one run; connected while its rounds last."""

    open: OpenGrid
    entry: int  # number of the strategy in its experiment
    seed: int
    timeout: float  # seconds for an answer
    refusal: str | None = None  # why these nodes cannot make the run
    exact: bool = True  # a run is not resumed without the momentum that nodes kept
    link: "RemoteClients | None" = None
    name: ClassVar[str] = "flower"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why the nodes cannot train the clients, or None."""
        del run
        return self.refusal

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`, on the nodes."""
        algorithm = run.task.algorithm
        kept = algorithm.keeps_state
        needed = run.task.layout.personal or algorithm.needs_client_state
        if start and (needed or (kept and self.exact)):
            raise ConfigError(
                "what this strategy or algorithm keeps on the nodes is in no checkpoint, so the "
                "run cannot be resumed; start it again with --no-resume."
            )
        if start and kept:
            log.warning("the run is resumed without the momentum that nodes kept for it.")
        with self.open() as grid:
            uses = run.faults.limits.layers
            self.link = RemoteClients(grid, run.task, self.entry, self.seed, self.timeout, uses)
            self.link.connect(run.clients.all())
            yield from loop.rounds(
                run.task, run.clients, run.rounds, start, train=self.link.train, faults=run.faults
            )

    def get_link(self) -> "RemoteClients":
        """Return the connection; it exists while rounds last."""
        if self.link is None:
            raise RuntimeError("nodes can be asked only while the rounds of a run last.")
        return self.link


@dataclass
class RemoteClients:
    """The connected nodes of one run, by the clients that they hold."""

    grid: Grid
    task: Task
    entry: int
    seed: int
    timeout: float
    uses: Mapping[str, LayerUse] = field(default_factory=dict)  # of layers, as far as it is known
    # Nodes that say they hold a client, the first one first: others wait until it is gone.
    claims: dict[ClientId, list[int]] = field(default_factory=dict)
    unassigned: list[int] = field(default_factory=list)  # nodes that hold no client yet
    asked: set[int] = field(default_factory=set)  # nodes that were asked for their partition
    answered: set[int] = field(default_factory=set)
    rejected: list[RejectedReply] = field(default_factory=list)  # of evaluations, until taken
    measured: dict[ClientId, int] = field(default_factory=dict)  # examples, at the first answer

    def __post_init__(self) -> None:
        self.grid = CheckedGrid(self.grid)

    @property
    def nodes(self) -> dict[ClientId, int]:
        """The node of each client: of those that claim it, the first that is connected."""
        there = set(self.grid.get_node_ids())
        return {
            client: next((node for node in nodes if node in there), nodes[0])
            for client, nodes in sorted(self.claims.items())
        }

    def connect(self, clients: Sequence[ClientId]) -> None:
        """Wait until each client has a node, or until `timeout` is over."""
        until = time.monotonic() + self.timeout
        while True:
            # A node may still be starting: ask it again until it answers.
            self.asked &= self.answered
            self._look(clients)
            missing = [client for client in clients if client not in self.claims]
            if not missing:
                return
            if time.monotonic() > until:
                break
            time.sleep(_LOOK)
        if len(missing) == len(clients):
            raise NoNodesError(f"no node has appeared within {self.timeout:g} seconds.")
        log.warning("there is no node for clients %s; the run continues without them.", missing)

    def _look(self, clients: Iterable[ClientId]) -> None:
        """Ask new nodes for their partition; those without one get a free client."""
        new = [node for node in self.grid.get_node_ids() if node not in self.asked]
        content = RecordDict({wire.HEADER: ConfigRecord({"version": wire.VERSION})})
        found: dict[int, int] = {}
        messages = [Message(content, node, "query.partition") for node in new]
        for reply in self.grid.send_and_receive(messages, timeout=_ASKED) if new else ():
            node = reply.metadata.src_node_id
            self.answered.add(node)
            try:
                with wire.guard_reading():
                    found[node] = wire.integer(wire.header(read_content(reply)), "partition")
            except WireError as error:
                log.warning("node %d cannot be used: %s", node, error)
        self.asked |= set(new)
        for node, client in sorted(found.items()):
            if client == NO_CLIENT:
                self.unassigned.append(node)
                continue
            if holders := self.claims.setdefault(client, []):
                text = "node %d says that it holds client %d, which node %d has; it must wait."
                log.warning(text, node, client, holders[0])
            holders.append(node)
        for client in sorted(set(clients) - self.claims.keys())[: len(self.unassigned)]:
            self.claims[client] = [self.unassigned.pop(0)]

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]]:
        """Let nodes train, anew after each exchange; return results and answers.

        The reply of a node that says its loss is not finite is a faulty one; if most say so, the
        training has diverged.
        """
        del client_states  # they stay on the nodes
        clients, answers = [own.client for own in batches], dict[str, Tensor]()
        replies: dict[ClientId, Reply] = {}
        asked = clients
        while asked:
            content = wire.broadcast_records(received)
            if answers:
                content[ANSWERS] = wire.to_array_record(answers)
            waiting: dict[ClientId, PendingError] = {}
            for client, found in self._call("train", content, asked).items():
                try:
                    with wire.guard_reading():
                        reply = self._read(found, client, received)
                except WireError as error:
                    reply = make_faulty(client, str(error))
                if isinstance(reply, PendingError):
                    waiting[client] = reply
                else:
                    replies[client] = reply
            asked = self._answer(waiting, replies, answers)
        lost = [reply for reply in replies.values() if not isfinite(reply.loss)]
        if 2 * len(lost) > len(clients):
            raise NonFiniteLossError(lost[0].client, received.round, lost[0].loss)
        return [(reply, ClientState()) for reply in replies.values()], answers

    def _read(
        self, found: RecordDict | Error, client: ClientId, received: Broadcast
    ) -> Reply | PendingError:
        content = _read_content(found)
        said = wire.header(content)
        if PENDING in content:
            return self._read_pending(content, said)
        if "loss" in said.values:
            loss = float(str(said["loss"]))
            if isfinite(loss):
                raise WireError("it sends a loss without an update.")
            return replace(make_faulty(client, f"its loss is {loss}"), loss=loss)
        sent = self.task.algorithm.sends(received.state.weights)
        return wire.read_reply(content, client, received.state, sent)

    def _read_pending(self, content: RecordDict, said: wire.Header) -> PendingError:
        if not self.task.strategy.exchanges:
            raise WireError("it waits for an exchange, which this strategy does not make.")
        value = wire.optional(content, PENDING)["value"]
        weight = float(str(said["weight"]))
        if not value.is_floating_point() or not value.isfinite().all():
            raise WireError("it exchanges values that are not finite.")
        if not 0 < weight <= LARGEST:
            raise WireError(f"it exchanges with the weight {weight}.")
        return PendingError(str(said["site"]), value, weight)

    def _answer(
        self,
        waiting: Mapping[ClientId, PendingError],
        replies: dict[ClientId, Reply],
        answers: dict[str, Tensor],
    ) -> list[ClientId]:
        """Answer the exchange at which most clients wait; return those that continue.

        All clients pass through the same exchanges. A client gets a faulty reply if it waits
        elsewhere, after most have finished, or more often than the model has places to exchange.
        """
        if not waiting:
            return []
        places = {c: (p.site, p.value.shape, p.value.dtype) for c, p in waiting.items()}
        ((place, count),) = Counter(places.values()).most_common(1)
        agreed = [client for client in waiting if places[client] == place]
        finished = sum(not reply.fault for reply in replies.values())
        over = place[0] in answers or len(answers) >= self._count_exchanges()
        late = over or count < finished
        for client, pending in waiting.items():
            if late or client not in agreed:
                said = f"it waits at {pending.site!r}, where others do not"
                replies[client] = make_faulty(client, wire.clean_text(said))
        rule = self.task.statistics_aggregator
        if late or not has_quorum(rule, len(agreed)):
            return []
        answers[waiting[agreed[0]].site] = answer_exchange([waiting[c] for c in agreed], rule)
        return agreed  # one that was lost in mid-round stays out of it

    def _count_exchanges(self) -> int:
        """Return how many exchanges a round can have: up to three for each call of a layer."""
        step = Claim(batches=1, layers=self.uses)
        return _PER_CALL * sum(step.limit_counter(path, 0) for path in self.task.layout.norms)

    def ask(self, received: Broadcast, clients: Sequence[ClientId]) -> list[Reply]:
        """Let clients measure the statistics of their data."""
        answers = self._call("query.calibration", wire.broadcast_records(received), clients)
        measured = []
        for client, found in answers.items():
            try:
                with wire.guard_reading():
                    content = _read_content(found)
                    layers = wire.header(content).layers()
                    stats = wire.read_stats(content, layers, self.task.initial_state.running)
                    measured.append(self._limit_examples(client, wire.examples_of(content), stats))
            except WireError as error:
                measured.append(make_faulty(client, str(error)))
        return measured

    def _limit_examples(
        self, client: ClientId, examples: int, stats: Mapping[str, LayerStats]
    ) -> Reply:
        """Return an answer to a calibration; it has no more examples than the client's first."""
        most = self.measured.setdefault(client, examples)
        if examples > most:
            return make_faulty(
                client, f"it reports {examples} examples, but can have {most} at most"
            )
        return Reply(client, examples, {}, {}, stats)

    def score_clients(
        self, state: ServerState, clients: Iterable[ClientId], adapt: float
    ) -> dict[ClientId, Score]:
        """Let clients test their models on their own data."""
        content = wire.broadcast_records(broadcast(self.task, state), adapt=adapt)
        scores: dict[ClientId, Score] = {}
        for client, found in self._call("evaluate", content, list(clients)).items():
            try:
                with wire.guard_reading():
                    score = _read_score(_read_content(found), self.task.metrics)
            except WireError as error:
                log.warning("the evaluation of client %d is rejected: %s", client, error)
                self.rejected.append(RejectedReply(client, str(error)))
            else:
                scores |= {client: score} if score else {}
        return scores

    def take_rejections(self) -> tuple[RejectedReply, ...]:
        """Return the answers to evaluations that were rejected since the last call."""
        found, self.rejected = tuple(self.rejected), []
        return found

    def _call(
        self, kind: str, content: RecordDict, clients: Sequence[ClientId]
    ) -> dict[ClientId, RecordDict | Error]:
        """Send `content` to the nodes of `clients`; return the answers by client.

        An error is an answer that cannot be read.
        """
        self._look(clients)
        there, holders = set(self.grid.get_node_ids()), self.nodes
        nodes = {holders[c]: c for c in clients if holders.get(c) in there}
        messages = []
        for node, client in nodes.items():
            said = {"entry": self.entry, "seed": self.seed, "client": client}
            head = ConfigRecord({**wire.header(content).values, **said})
            messages.append(Message(RecordDict({**content, wire.HEADER: head}), node, kind))
        found: dict[ClientId, RecordDict | Error] = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout) if nodes else ():
            client = nodes[reply.metadata.src_node_id]
            if not reply.has_error():
                found[client] = reply.content
            elif is_unreadable(reply):
                found[client] = reply.error
            else:
                log.warning("client %d could not: %s", client, wire.clean_text(read_reason(reply)))
        if missing := sorted(set(clients) - set(found)):
            log.warning("no answer of clients %s to %r.", missing, kind)
        return dict(sorted(found.items()))


def make_faulty(client: ClientId, reason: str) -> Reply:
    """Return a reply in place of an unreadable one; the server rejects it by name."""
    return Reply(client, 0, {}, {}, {}, fault=reason)


def _read_content(found: RecordDict | Error) -> RecordDict:
    if isinstance(found, Error):
        raise WireError(str(found.reason))
    return found


def _read_score(content: RecordDict, metrics: Metrics) -> Score | None:
    """Return the score of a client; None if it has no test samples."""
    values = wire.read_metrics(content)
    if not values:
        return None
    named = {name: values[f"{wire.OWN_METRIC}{name}"] for name in metrics.named}
    score = Score(values["accuracy"], values["loss"], int(values["examples"]), named)
    least = -inf if metrics.target == "values" else 0  # R² has no lower bound
    fits = least <= score.accuracy <= 1 and isfinite(score.accuracy)
    if not fits or not 0 < score.examples <= LARGEST:
        raise WireError(f"its accuracy is {score.accuracy} on {score.examples} samples.")
    return score
