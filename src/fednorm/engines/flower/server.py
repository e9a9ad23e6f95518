"""The server's half of a Flower app of your own: fednorm's strategies as one of Flower's.

FedAvg, or the strategy that is given as `server`, chooses nodes, evaluates and averages metrics.
`server_round` handles normalization. A `server` such as FedAdam, or a wrapper for differential
privacy around it, sees messages that hold only the weights: neither counters nor statistics.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor, nn

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Claim, RejectedReply, Reply, ServerState
from fednorm.core.replies.validation import find_state_fault, list_clients
from fednorm.core.round import broadcast, find_remedy, reply_schema, server_calibration
from fednorm.core.round import server_round as _server_round  # Flower calls a number by this name
from fednorm.core.strategy import Strategy as Norm
from fednorm.core.task import Task, export, read_state
from fednorm.core.types import Tensors
from fednorm.engines.evaluation import is_personal
from fednorm.engines.flower import wire
from fednorm.engines.flower.client import (
    describe_strategy,
    load_folded,
    read_initial_arrays,
    write_global_model,
)
from fednorm.engines.flower.node_answers import (
    CheckedGrid,
    NodeNumbers,
    average_metrics,
    explain_central,
    find_odd,
    find_weight_key,
    is_unreached,
    list_failures,
    read_calibration,
    read_content,
    read_reply,
    refuse_calibration,
    refuse_evaluation,
    refuse_server,
    refuse_training,
    strip_message,
    warn_of_local_steps,
)
from fednorm.errors import ConfigError, NonFiniteLossError, NoUsableReplyError, WireError
from fednorm.nn.copies import copy_model
from fednorm.nn.folding import fold
from fednorm.strategies import STRATEGIES, create_strategy

Evaluate: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]
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
        max_examples: most examples that a node may report; a reply with more is rejected.
        arguments: FedAvg's usual ones (`fraction_train`, `min_available_nodes`, …).

    >>> strategy = NormStrategy("fbn", model=nn.BatchNorm1d(2), min_available_nodes=3)
    >>> result = strategy.start(grid, num_rounds=100)  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 (what a strategy of Flower's is made of, by keywords)
        self,
        strategy: str | Norm,
        *,
        model: nn.Module,
        server: Strategy | None = None,
        aggregator: str = "mean",
        statistics_aggregator: str = "mean",
        byzantine: int = 0,
        max_examples: int | None = None,
        **arguments: Any,
    ) -> None:
        refuse_server(server)
        if server is not None and aggregator != "mean":
            raise ConfigError("the strategy that is passed as server combines the weights itself.")
        if server is not None and arguments:
            raise ConfigError(
                f"{', '.join(arguments)} must be given to the strategy that is passed as server."
            )
        self.norm = create_strategy(strategy) if isinstance(strategy, str) else strategy
        if self.norm.exchanges:
            raise ConfigError(
                f"{strategy!r} exchanges statistics in the middle of a step, which a training loop "
                "of your own cannot wait for; use `fednorm run --engine flower` for it."
            )
        self.given, self.server = copy_model(model), server
        self.around = server or FedAvg(**arguments)  # decides on all that is not normalization
        self.rules = (
            create_aggregator(aggregator, byzantine),
            create_aggregator(statistics_aggregator, byzantine),
        )
        self.claim = Claim() if max_examples is None else Claim(examples=max_examples)
        self.task = self._build_task(self.given, None)
        self.state = self.task.initial_state
        self.tested = self.state  # its statistics may be measured anew for an evaluation
        self.grid: Grid | None = None
        self.timeout = 3600.0
        self.started = False
        self.worked: set[str] = set()  # what nodes have done without an error
        self.numbers = NodeNumbers()
        self.rejected: dict[int, list[RejectedReply]] = {}  # by round; clients are nodes' ids

    @property
    def model(self) -> nn.Module:
        """The global model as it stands, ready for evaluation; `result.arrays` holds the same.

        Layers are torch's own wherever they can be. Tensors that stay on the nodes (fedbn, silobn)
        are as in the model that was given.
        """
        return fold(export(self.task, self.tested))

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
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run all rounds; `initial_arrays` may be left out, the model's own are taken then."""
        self.timeout, self.started = timeout, True
        self._begin(initial_arrays, num_rounds)
        test = self._guard(evaluate_fn) if evaluate_fn else None
        around = CheckedGrid(grid)
        return super().start(
            around, self._arrays(), num_rounds, timeout, train_config, evaluate_config, test
        )

    def _begin(self, initial: ArrayRecord | None, rounds: int) -> None:
        model, found = copy_model(self.given), None
        if initial is not None:
            found = read_initial_arrays(initial, self.task, model)
            if found.keys() == model.state_dict().keys():
                model.load_state_dict(wire.expect("initial_arrays", found, model.state_dict()))
                found = None
        self.task = self._build_task(model, rounds)
        if found is not None:  # such as the result of another run
            load_folded(self.task.model, found)
        self.state = self.tested = read_state(self.task.layout)

    def _guard(self, evaluate_fn: Evaluate) -> Evaluate | None:
        """Let a central evaluation test what was trained, or nothing."""
        if is_personal(self.task):
            log.warning(
                "evaluate_fn is not called: strategy %r keeps BatchNorm layers on the nodes, so "
                "that there is no global model; evaluate on the nodes.",
                self._name,
            )
            return None

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            try:
                return evaluate_fn(server_round, arrays)
            except RuntimeError as error:
                if "state_dict" in str(error) and not self._fits_plain(arrays):
                    raise ConfigError(explain_central(self._name)) from error
                raise

        return evaluate

    @property
    def _name(self) -> str:
        return STRATEGIES.name_of(type(self.norm)) or type(self.norm).__name__

    def _arrays(self) -> ArrayRecord:
        """Return the global model, without what stays on the nodes."""
        return write_global_model(self.task, self.model)

    def _fits_plain(self, arrays: ArrayRecord) -> bool:
        return arrays.keys() == self.given.state_dict().keys()

    def initialize_parameters(self, *_: object, **__: object) -> NoReturn:
        """Refuse a legacy server, which begins with this call."""
        raise ConfigError(
            "NormStrategy cannot be run by a legacy server (ServerAppComponents, LegacyContext, "
            "and SecAgg+, which needs them); call strategy.start(grid, ...) in @app.main()."
        )

    def summary(self) -> None:
        """Log what this strategy does."""
        log.info("\t├──> Normalization: %s", self.norm)
        self.around.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose nodes and write their messages."""
        del arrays  # as in self.state, which knows what is what
        if not self.started:
            raise ConfigError(
                "another strategy, such as a wrapper for differential privacy, is around "
                "NormStrategy and would treat statistics as weights; put it inside: "
                "NormStrategy(..., server=Wrapper(FedAvg(), ...))."
            )
        self.grid = grid
        # A round without answers counts for Flower, so it must count here.
        self.state = replace(self.state, round=server_round - 1)
        weights = wire.to_array_record(self.state.weights)
        messages = list(self.around.configure_train(server_round, weights, config, grid))
        return _add_records(messages, lambda key: self._records(self.state, key))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose nodes for an evaluation of the global model."""
        del arrays
        messages = list(self.around.configure_evaluate(server_round, self._arrays(), config, grid))
        strategy = describe_strategy(self.norm)

        def make(key: str) -> RecordDict:
            said = ConfigRecord({"version": wire.VERSION, "strategy": strategy, "weights": key})
            return RecordDict({wire.HEADER: said})

        return _add_records(messages, make)

    def _records(self, state: ServerState, weights: str = wire.WEIGHTS) -> RecordDict:
        sent = broadcast(self.task, state)
        return wire.broadcast_records(sent, strategy=describe_strategy(self.norm), weights=weights)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge what the nodes sent; one that failed or cannot be read is left out by name."""
        usable = self._select_usable(list(replies), server_round)
        try:
            asked = {reply.client: self.claim for reply, _ in usable}
            after = _server_round(self.task, self.state, [r for r, _ in usable], asked=asked)
        except NoUsableReplyError as error:
            log.warning("%s; the model stays as it is.", error)
            if server_round in self.rejected:
                remedy = find_remedy(self.task, self.state) or NonFiniteLossError.REMEDY
                log.warning("If the training has diverged: %s", remedy)
            return None, None
        senders = {reply.client: m.metadata.src_node_id for reply, m in usable}
        for one in after.rejected:
            self._reject(server_round, senders[one.client], one.reason)
        gone = list_clients(after.rejected)
        bare = [strip_message(message) for reply, message in usable if reply.client not in gone]
        if self.server is None:
            metrics = average_metrics(self.around, bare)
        else:
            chosen, metrics = self.server.aggregate_train(server_round, bare)
            if chosen is None:
                return None, metrics
            after = replace(after, weights=_read_weights(chosen, self.state.weights))
            if fault := find_state_fault(after):
                log.warning("round %d: %s; the model stays as it is.", server_round, fault[1])
                return None, metrics
        warn_of_local_steps(self.task, self._name, self.state, after)
        before, self.state, self.tested = self.tested, after, after
        if self.norm.calibration == "evaluation" and self.grid is not None:
            nodes = list(self.grid.get_node_ids())
            self.tested = self._calibrate(nodes) or replace(after, running=before.running)
        return self._arrays(), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of an evaluation."""
        found = list(replies)
        if any(not message.has_error() for message in found):
            self.worked.add("evaluate")
        elif "evaluate" not in self.worked and not self._fits_plain(self._arrays()):
            refuse_evaluation(self._name, list_failures(found))
        return self.around.aggregate_evaluate(server_round, self._drop_odd(found, server_round))

    def _drop_odd(self, replies: list[Message], server_round: int) -> list[Message]:
        """Leave out, by name, replies that Flower's strategies cannot average with the others."""
        tested = [message for message in replies if not message.has_error()]
        places = find_odd([message.content for message in tested], find_weight_key(self.around))
        odd = [tested[place].metadata.src_node_id for place in places]
        for node in odd:
            self._reject(server_round, node, "its metrics are not those of the others")
        return [message for message in replies if message.metadata.src_node_id not in odd]

    def _reject(self, server_round: int, node: int, reason: str) -> None:
        self.rejected.setdefault(server_round, []).append(RejectedReply(node, reason))
        log.warning("round %d continues without node %d: %s", server_round, node, reason)

    def _select_usable(
        self, replies: list[Message], server_round: int
    ) -> list[tuple[Reply, Message]]:
        usable, wanted = [], reply_schema(self.task, self.state)
        faults: dict[int, str] = {}
        for message in sorted(replies, key=lambda one: one.metadata.src_node_id):
            node = message.metadata.src_node_id
            try:
                with wire.guard_reading():
                    reply = read_reply(self.state, read_content(message), wanted)
                number = self.numbers.find(node, reply.client)
                usable.append((replace(reply, client=number), message))
            except WireError as error:
                faults[node] = str(error)
        if usable:
            self.worked.add("train")
        elif "train" not in self.worked and not all(map(is_unreached, replies)):
            refuse_training([f"node {node}: {text}" for node, text in faults.items()])
        for node, fault in faults.items():
            self._reject(server_round, node, fault)
        if self.server is not None:
            kept = self._drop_odd([strip_message(message) for _, message in usable], server_round)
            nodes = {message.metadata.src_node_id for message in kept}
            usable = [pair for pair in usable if pair[1].metadata.src_node_id in nodes]
        return sorted(usable, key=lambda pair: pair[0].client)

    def _calibrate(self, nodes: list[int]) -> ServerState | None:
        """Return the state with the statistics that nodes measure; None if no node answers."""
        if self.grid is None or not nodes:
            return None
        records = self._records(self.state)
        messages = [Message(records, node, _QUERY) for node in nodes]
        found, faults = [], []
        replies = list(self.grid.send_and_receive(messages, timeout=self.timeout))
        for message in replies:
            node = message.metadata.src_node_id
            try:
                with wire.guard_reading():
                    read = read_calibration(read_content(message), self.state)
                found.append(replace(read, client=self.numbers.find(node, read.client)))
            except WireError as error:
                faults.append(f"node {message.metadata.src_node_id}: {error}")
        if not found and not all(map(is_unreached, replies)):
            refuse_calibration(self._name, faults)
        for fault in faults:
            log.warning("no statistics of %s", fault)
        found.sort(key=lambda reply: reply.client)  # sums are taken in this order
        return server_calibration(self.task, self.state, found) if found else None


def calibrate_model(grid: Grid, model: nn.Module, *, timeout: float = 3600.0) -> nn.Module:
    """Return a copy of a trained model whose BatchNorm statistics are pooled over all nodes.

    The repair for a model that plain FedAvg has trained: one message to each node, which answers
    by `@app.query("fednorm")` with `fednorm.flower.calibrate`, as for `heterofl`.

    >>> calibrated = calibrate_model(grid, model)  # doctest: +SKIP
    """
    asking = NormStrategy(create_strategy("heterofl", statistics="pool"), model=model)
    asking.grid, asking.timeout = CheckedGrid(grid), timeout
    found = asking._calibrate(list(grid.get_node_ids()))  # noqa: SLF001 (of this file)
    if found is None:
        raise ConfigError(
            "no node has answered with its statistics; call calibrate_model while nodes are "
            "connected, with a timeout that their pass over the data fits into."
        )
    asking.tested = found
    return asking.model


def _add_records(messages: list[Message], make: Callable[[str], RecordDict]) -> list[Message]:
    """Add what normalization needs; `make` gets the key of the arrays, whatever it is called."""
    if messages:
        (key,) = messages[0].content.array_records
        ours = make(key)
        ours.pop(wire.WEIGHTS, None)  # they are in the messages
        for message in messages:
            message.content = RecordDict({**ours, **message.content})
    return messages


def _read_weights(found: ArrayRecord, like: Tensors) -> dict[str, Tensor]:
    """Return the weights that a server strategy decided on, in the model's own number format.

    Some of them compute in float64.
    """
    new = {k: v.to(like[k].dtype) if k in like else v for k, v in wire.to_tensors(found).items()}
    return wire.expect("the server", new, like)
