"""The server's side of a run on nodes, which train, calibrate and evaluate.

A node that fails, is gone or is too late is missing from a round; the run continues without it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fednorm.core.exchange import PendingError, answer_exchange
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply, ServerState
from fednorm.core.round import broadcast
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines import loop
from fednorm.engines.base import EngineRun, Progress, RoundResult
from fednorm.engines.evaluation import Score
from fednorm.engines.flower import wire
from fednorm.engines.flower.node_app import ANSWERS, NO_CLIENT, PENDING
from fednorm.errors import ConfigError, NonFiniteLossError, NoNodesError, WireError

_ASKED = 60.0  # seconds for a node to say which partition it has
_LOOK = 0.5  # seconds between looks for nodes
log = logging.getLogger("fednorm")

OpenGrid: TypeAlias = Callable[[], AbstractContextManager[Grid]]


@dataclass
class FlowerNodes:
    """The nodes of one run; connected while its rounds go on."""

    open: OpenGrid
    entry: int  # number of the strategy in its experiment
    seed: int
    timeout: float  # seconds for an answer
    refusal: str | None = None  # why these nodes cannot make the run
    link: "RemoteClients | None" = None
    name: ClassVar[str] = "flower"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why the nodes cannot train the clients, or None."""
        del run
        return self.refusal

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`, on the nodes."""
        if start and (run.task.layout.personal or run.task.algorithm.keeps_state):
            raise ConfigError(
                "what this strategy or its momentum keeps on the nodes is in no checkpoint, so the "
                "run cannot be resumed; start it again with --no-resume."
            )
        with self.open() as grid:
            self.link = RemoteClients(grid, run.task, self.entry, self.seed, self.timeout)
            self.link.connect(run.clients.all())
            yield from loop.rounds(
                run.task, run.clients, run.rounds, start, train=self.link.train, faults=run.faults
            )

    def get_link(self) -> "RemoteClients":
        """Return the connection; it exists while rounds go on."""
        if self.link is None:
            raise RuntimeError("nodes can be asked only while the rounds of a run go on.")
        return self.link


@dataclass
class RemoteClients:
    """The connected nodes of one run, by the clients that they hold."""

    grid: Grid
    task: Task
    entry: int
    seed: int
    timeout: float
    nodes: dict[ClientId, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # nodes that were asked for their partition
    answered: set[int] = field(default_factory=set)

    def connect(self, clients: Sequence[ClientId]) -> None:
        """Wait until each client has a node, or until `timeout` is over."""
        until = time.monotonic() + self.timeout
        while True:
            # A node may still be starting: ask it again until it answers.
            self.asked &= self.answered
            self._look(clients)
            missing = [client for client in clients if client not in self.nodes]
            if not missing:
                return
            if time.monotonic() > until:
                break
            time.sleep(_LOOK)
        if not self.nodes:
            raise NoNodesError(f"no node has appeared within {self.timeout:g} seconds.")
        log.warning("there is no node for clients %s; the run continues without them.", missing)

    def _look(self, clients: Iterable[ClientId]) -> None:
        """Ask new nodes for their partition; those without one get a free client."""
        new = [node for node in self.grid.get_node_ids() if node not in self.asked]
        content = RecordDict({wire.HEADER: ConfigRecord({"version": wire.VERSION})})
        found: dict[int, int] = {}
        messages = [Message(content, node, "query.partition") for node in new]
        for reply in self.grid.send_and_receive(messages, timeout=_ASKED) if new else ():
            self.answered.add(reply.metadata.src_node_id)
            try:
                said = wire.header(wire.content(reply))
                found[reply.metadata.src_node_id] = int(str(said["partition"]))
            except WireError as error:
                log.warning("node %d cannot be used: %s", reply.metadata.src_node_id, error)
        self.asked |= set(new)
        wanted = set(clients)
        self.nodes |= {client: node for node, client in found.items() if client in wanted}
        free = sorted(wanted - self.nodes.keys())
        unassigned = sorted(node for node, client in found.items() if client == NO_CLIENT)
        self.nodes |= dict(zip(free, unassigned, strict=False))

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]]:
        """Let nodes train, anew after each exchange; return results and answers."""
        del client_states  # they stay on the nodes
        clients, answers = [own.client for own in batches], dict[str, Tensor]()
        while True:
            content = wire.broadcast_records(received)
            if answers:
                content[ANSWERS] = wire.to_array_record(answers)
            results: list[tuple[Reply, ClientState]] = []
            waiting: dict[ClientId, PendingError] = {}
            for client, found in self._call("train", content, clients).items():
                reply = self._read(found, client, received)
                if isinstance(reply, PendingError):
                    waiting[client] = reply
                elif reply is not None:
                    results.append((reply, ClientState()))
            if not waiting:
                return results, answers
            clients = list(waiting)  # one that was lost in mid-round stays out of it
            answers[waiting[clients[0]].site] = answer_exchange(
                list(waiting.values()), self.task.statistics_aggregator
            )

    @staticmethod
    def _read(
        found: RecordDict, client: ClientId, received: Broadcast
    ) -> Reply | PendingError | None:
        try:
            said = wire.header(found)
            if PENDING in found:
                value = wire.optional(found, PENDING)["value"]
                return PendingError(str(said["site"]), value, float(str(said["weight"])))
            if "loss" in said.values:
                raise NonFiniteLossError(client, received.round, float(str(said["loss"])))
            return wire.read_reply(found, client, received.state)
        except (WireError, KeyError) as error:
            log.warning("round %d continues without client %d: %s", received.round, client, error)
            return None

    def ask(self, received: Broadcast, clients: Sequence[ClientId]) -> list[Reply]:
        """Let clients measure the statistics of their data."""
        answers = self._call("query.calibration", wire.broadcast_records(received), clients)
        measured = []
        for client, found in answers.items():
            try:
                layers = wire.header(found).layers()
                stats = wire.read_stats(found, layers, self.task.initial_state.running)
                measured.append(Reply(client, wire.examples_of(found), {}, {}, stats))
            except WireError as error:
                log.warning("no statistics of client %d: %s", client, error)
        return measured

    def score_clients(
        self, state: ServerState, clients: Iterable[ClientId], adapt: float
    ) -> dict[ClientId, Score]:
        """Let clients test their models on their own data."""
        content = wire.broadcast_records(broadcast(self.task, state), adapt=adapt)
        scores = {}
        for client, found in self._call("evaluate", content, list(clients)).items():
            values = {key: float(str(v)) for key, v in found[wire.METRICS].items()}
            if values:
                examples = int(values["examples"])
                scores[client] = Score(values["accuracy"], values["loss"], examples)
        return scores

    def _call(
        self, kind: str, content: RecordDict, clients: Sequence[ClientId]
    ) -> dict[ClientId, RecordDict]:
        """Send `content` to the nodes of `clients`; return the answers by client."""
        self._look(clients)
        there = set(self.grid.get_node_ids())
        nodes = {self.nodes[c]: c for c in clients if self.nodes.get(c) in there}
        messages = []
        for node, client in nodes.items():
            said = {"entry": self.entry, "seed": self.seed, "client": client}
            head = ConfigRecord({**wire.header(content).values, **said})
            messages.append(Message(RecordDict({**content, wire.HEADER: head}), node, kind))
        found: dict[ClientId, RecordDict] = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout) if nodes else ():
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("client %d could not: %s", nodes[node], reply.error.reason)
            else:
                found[nodes[node]] = reply.content
        if missing := sorted(set(clients) - set(found)):
            log.warning("no answer of clients %s to %r.", missing, kind)
        return dict(sorted(found.items()))
