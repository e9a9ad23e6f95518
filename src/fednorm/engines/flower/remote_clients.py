"""The server's side of a run: `simulate.rounds` with nodes that train, survey and evaluate.

A node that fails, is gone or is too late is missing from a round; the run goes on with the others.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fednorm.core.calibration import CalibrationReply
from fednorm.core.exchange import PendingError, answer_exchange
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply, ServerState
from fednorm.core.round import broadcast
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.evaluation import Score
from fednorm.engines.flower import wire
from fednorm.engines.flower.arrays import to_array_record
from fednorm.engines.flower.node_app import ANSWERS, NO_CLIENT, PENDING
from fednorm.errors import NonFiniteLossError, NoNodesError, WireError

_ASKED = 60.0  # seconds for a node to say which partition it has
_LOOK = 0.5  # seconds between looks for nodes
log = logging.getLogger("fednorm")


@dataclass
class RemoteClients:
    """Nodes of one run, found by the clients that they hold."""

    grid: Grid
    entry: int  # number of the strategy in its experiment
    seed: int
    timeout: float  # seconds for an answer
    nodes: dict[ClientId, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # nodes that were asked for their partition
    answered: set[int] = field(default_factory=set)

    def connect(self, clients: Sequence[ClientId]) -> None:
        """Wait until there is a node for each client, or until the time is up."""
        until = time.monotonic() + self.timeout
        while True:
            # A node may still be starting when it is first asked: until it answers, ask it again.
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
        log.warning("there is no node for clients %s; the run goes on without them.", missing)

    def _look(self, clients: Iterable[ClientId]) -> None:
        """Ask nodes that are new for their partition; those without one get a free client."""
        new = [node for node in self.grid.get_node_ids() if node not in self.asked]
        content = RecordDict({wire.HEADER: ConfigRecord({"version": wire.VERSION})})
        found: dict[int, int] = {}
        messages = [Message(content, node, "query.who") for node in new]
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
        task: Task,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[list[tuple[Reply, ClientState]], dict[str, Tensor]]:
        """Let nodes train, again and again while they wait for answers of an exchange."""
        del client_states  # they stay on the nodes
        clients, answers = [own.client for own in batches], dict[str, Tensor]()
        while True:
            content = wire.broadcast_records(received)
            if answers:
                content[ANSWERS] = to_array_record(answers)
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
                list(waiting.values()), task.statistics_aggregator
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

    def ask(
        self, task: Task, received: Broadcast, clients: Sequence[ClientId]
    ) -> list[CalibrationReply]:
        """Return what clients say of the statistics of their data."""
        answers = self._call("query.survey", wire.broadcast_records(received), clients)
        surveyed = []
        for client, found in answers.items():
            try:
                layers = wire.header(found).layers()
                stats = wire.read_stats(found, layers, task.initial_state.running)
                surveyed.append(CalibrationReply(client, wire.examples_of(found), stats))
            except WireError as error:
                log.warning("no statistics of client %d: %s", client, error)
        return surveyed

    def scores(
        self, task: Task, state: ServerState, clients: Iterable[ClientId], adapt: float
    ) -> dict[ClientId, Score]:
        """Let clients test their models on their own data."""
        content = wire.broadcast_records(broadcast(task, state), adapt=adapt)
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
        """Send to the nodes of clients and return what came back, by client."""
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
