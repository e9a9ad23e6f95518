"""The server's half of a Flower app of your own: fednorm's strategies as one of Flower's.

FedAvg, or the strategy that is given as `server`, chooses nodes, evaluates and averages metrics.
`server_round` handles normalization. A `server` such as
FedAdam, or a wrapper for differential privacy around it, sees messages that hold the weights and
nothing else: neither counters nor statistics.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import nn

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Reply, ServerState
from fednorm.core.round import broadcast, reply_schema, server_calibration, server_round
from fednorm.core.strategy import Strategy as Norm
from fednorm.core.task import Task, export, read_state
from fednorm.core.validation import ReplySchema, find_fault
from fednorm.engines.flower import wire
from fednorm.engines.flower.client import describe_strategy
from fednorm.engines.flower.wire import expect, to_array_record, to_tensors
from fednorm.errors import NoUsableReplyError, WireError
from fednorm.nn.copies import copy_model
from fednorm.strategies import create_strategy as by_name

_QUERY = "query.fednorm"
log = logging.getLogger("flwr")


class NormStrategy(Strategy):
    """A normalization strategy for `ServerApp`s.

    Args:
        strategy: a name such as "fbn", or `fednorm.create_strategy("fbn", stats_momentum=0.05)`.
        model: the model that clients pass to `unpack`; it is copied.
        server: one of Flower's strategies that decides on the weights, such as FedAdam; FedAvg's
            arguments belong to it then.
        aggregator: how weights are combined: "mean", or a robust rule such as "nnm > median".
        statistics_aggregator: how statistics are combined, in the same words.
        byzantine: number of Byzantine clients that the robust rules withstand.
        arguments: FedAvg's usual ones (`fraction_train`, `min_available_nodes`, …).
    """

    def __init__(
        self,
        strategy: str | Norm,
        *,
        model: nn.Module,
        server: Strategy | None = None,
        aggregator: str = "mean",
        statistics_aggregator: str = "mean",
        byzantine: int = 0,
        **arguments: Any,
    ) -> None:
        if server is not None and aggregator != "mean":
            raise ValueError("the strategy that is passed as server combines the weights itself.")
        if server is not None and arguments:
            raise ValueError(
                f"{', '.join(arguments)} must be given to the strategy that is passed as server."
            )
        self.norm = by_name(strategy) if isinstance(strategy, str) else strategy
        if self.norm.exchanges:
            raise ValueError(
                f"{strategy!r} exchanges statistics in the middle of a step, which a training loop "
                "of your own cannot wait for; use `fednorm run --engine flower` for it."
            )
        self.given, self.server = copy_model(model), server
        self.around = server or FedAvg(**arguments)  # decides on all that is not normalization
        self.rules = (
            create_aggregator(aggregator, byzantine),
            create_aggregator(statistics_aggregator, byzantine),
        )
        self.task = self._build_task(self.given, None)
        self.state = self.task.initial_state
        self.tested = self.state  # its statistics may be measured anew for an evaluation
        self.grid: Grid | None = None
        self.timeout = 3600.0

    @property
    def model(self) -> nn.Module:
        """The converted model as it stands, ready for evaluation; `result.arrays` fits into it."""
        return export(self.task, self.tested)

    def _build_task(self, model: nn.Module, rounds: int | None) -> Task:
        return Task.build(
            model,
            self.norm,
            create_algorithm("fedavg"),
            rounds=rounds,
            aggregator=self.rules[0],
            statistics_aggregator=self.rules[1],
        )

    def start(  # noqa: PLR0913, PLR0917 (the signature is Flower's)
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds; `initial_arrays` may be left out, the model's own are taken then."""
        self.timeout = timeout
        self._begin(initial_arrays, num_rounds)
        return super().start(
            grid, self._arrays(), num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def _begin(self, initial: ArrayRecord | None, rounds: int) -> None:
        found = to_tensors(initial) if initial is not None else self.given.state_dict()
        model = copy_model(self.given)
        if found.keys() == model.state_dict().keys():
            model.load_state_dict(expect("initial_arrays", found, model.state_dict()))
        self.task = self._build_task(model, rounds)
        converted = self.task.model.state_dict()
        if found.keys() == converted.keys():  # such as the result of another run
            self.task.model.load_state_dict(expect("initial_arrays", found, converted))
        elif found.keys() != model.state_dict().keys():
            expect("initial_arrays", found, model.state_dict())
        self.state = self.tested = read_state(self.task.layout)

    def _arrays(self) -> ArrayRecord:
        """Return the global model, whole: it loads with strict=True."""
        return to_array_record(self.model.state_dict())

    def summary(self) -> None:
        """Log what this strategy does."""
        log.info("\t├──> Normalization: %s", self.norm)
        self.around.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose nodes and write their messages."""
        del arrays  # as in self.state, which knows what is what
        self.grid = grid
        # A round without answers counts for Flower, so it must count here.
        self.state = replace(self.state, round=server_round - 1)
        weights = to_array_record(self.state.weights)
        messages = list(self.around.configure_train(server_round, weights, config, grid))
        return self._add_records(messages, self.state)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose nodes for an evaluation of the global model."""
        del arrays
        weights = to_array_record(self.state.weights)
        messages = list(self.around.configure_evaluate(server_round, weights, config, grid))
        return self._add_records(messages, self.tested)

    def _add_records(self, messages: list[Message], state: ServerState) -> list[Message]:
        """Add to the weights what normalization needs."""
        if not messages:
            return messages
        (key,) = messages[0].content.array_records  # the weights, whatever they are called
        ours = self._records(state, key)
        del ours[wire.WEIGHTS]
        for message in messages:
            message.content = RecordDict({**message.content, **ours})
        return messages

    def _records(self, state: ServerState, weights: str = wire.WEIGHTS) -> RecordDict:
        sent = broadcast(self.task, state)
        return wire.broadcast_records(sent, strategy=describe_strategy(self.norm), weights=weights)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge what the nodes sent; one that failed or cannot be read is left out by name."""
        usable = self._select_usable(list(replies), server_round)
        metrics: MetricRecord | None = None
        try:
            after = _server_round(self.task, self.state, [reply for reply, _ in usable])
        except NoUsableReplyError as error:
            log.warning("%s; the model stays as it is.", error)
            return None, None
        bare = [_strip_message(message) for _, message in usable]
        if self.server is None:
            metrics = _average_metrics(self.around, bare)
        else:
            chosen, metrics = self.server.aggregate_train(server_round, bare)
            if chosen is None:
                return None, metrics
            found = expect("the server", to_tensors(chosen), self.state.weights)
            after = replace(after, weights=found)
        self.state = self.tested = after
        if self.norm.calibration == "evaluation" and self.grid is not None:
            self.tested = self._calibrate(list(self.grid.get_node_ids()))
        return self._arrays(), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of an evaluation."""
        return self.around.aggregate_evaluate(server_round, replies)

    def _select_usable(
        self, replies: list[Message], server_round: int
    ) -> list[tuple[Reply, Message]]:
        usable, wanted = [], reply_schema(self.task, self.state)
        for message in replies:
            try:
                usable.append((_read_reply(self.state, wire.content(message), wanted), message))
            except WireError as error:
                node = message.metadata.src_node_id
                log.warning("round %d continues without node %d: %s", server_round, node, error)
        return sorted(usable, key=lambda pair: pair[0].client)

    def _calibrate(self, nodes: list[int]) -> ServerState:
        """Ask nodes for the statistics of their data and let the strategy adopt them."""
        if self.grid is None or not nodes:
            return self.state
        records = self._records(self.state)
        messages = [Message(records, node, _QUERY) for node in nodes]
        found = []
        for message in self.grid.send_and_receive(messages, timeout=self.timeout):
            try:
                found.append(read_calibration(wire.content(message), self.state))
            except WireError as error:
                log.warning("no statistics of node %d: %s", message.metadata.src_node_id, error)
        return server_calibration(self.task, self.state, found)


_server_round = server_round  # Flower calls a number by this name


def read_calibration(content: RecordDict, state: ServerState) -> Reply:
    """Return a client's answer to a query for its statistics."""
    said = wire.header(content)
    stats = wire.read_stats(content, said.layers(), state.running)
    return Reply(wire.integer(said, "client"), wire.examples_of(content), {}, {}, stats)


def _read_reply(state: ServerState, content: RecordDict, wanted: ReplySchema) -> Reply:
    said = wire.header(content)
    (weights,) = _select_weights(content).array_records.values()
    new = expect("the reply", to_tensors(weights), state.weights)
    reply = Reply(
        client=wire.integer(said, "client"),
        examples=wire.examples_of(content),
        update={name: new[name] - state.weights[name] for name in wanted.update},
        buffers=expect("the reply", wire.optional(content, wire.BUFFERS), state.buffers),
        stats=wire.read_stats(content, said.layers(), state.running),
    )
    if found := find_fault(reply, wanted):
        raise WireError(" ".join(found).strip())
    return reply


def _select_weights(content: RecordDict) -> RecordDict:
    """Return weights and metrics, as plain FedAvg would have them."""
    plain = {key: value for key, value in content.items() if not key.startswith(wire.HEADER)}
    found = RecordDict(plain)
    if len(found.array_records) != 1 or len(found.metric_records) != 1:
        raise WireError(f"a reply has one record of weights, but this one has {sorted(plain)}")
    return found


def _strip_message(message: Message) -> Message:
    bare = copy.copy(message)
    bare.content = _select_weights(message.content)
    return bare


def _average_metrics(around: Strategy, replies: list[Message]) -> MetricRecord | None:
    if not isinstance(around, FedAvg):
        return None
    return around.train_metrics_aggr_fn([r.content for r in replies], around.weighted_by_key)
