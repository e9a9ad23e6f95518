"""The ClientApp of a node: `client_round` on the node's data, with a state that stays there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fednorm.core.layer import PendingError, Replay
from fednorm.core.messages import Broadcast
from fednorm.core.round import client_calibration, client_round
from fednorm.core.task import Task
from fednorm.engines.base import ClientSource
from fednorm.engines.evaluation import TestSource, score_clients
from fednorm.engines.flower import wire
from fednorm.errors import NonFiniteLossError

ANSWERS, PENDING = "fednorm.answers", "fednorm.pending"
NO_CLIENT = -1  # a node that was given no partition


class NodeData(ClientSource, TestSource, Protocol):
    """The data that a node holds."""


@dataclass(frozen=True, slots=True)
class Site:
    """A run as a node sees it."""

    task: Task
    data: NodeData
    threads: int = 1


Build: TypeAlias = Callable[[Context, int, int], Site]  # context, number of the strategy, seed


def client_app(build: Build) -> ClientApp:
    """Return the app of a node; `build` makes a run of a strategy and a seed."""
    app = ClientApp()

    @app.query("partition")
    def partition(message: Message, context: Context) -> Message:
        number = int(context.node_config.get("partition-id", NO_CLIENT))
        return _answer_with(message, partition=number)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        site, client, tag = _site(build, message, context)
        received = _read_received(site, message)
        own = site.data.batches(client, received.round)
        answers = Replay(wire.optional(message.content, ANSWERS))
        client_state = wire.load_client_state(context.state, tag)
        try:
            reply, kept = client_round(site.task, received, client_state, own, answers)
        except PendingError as pending:
            value = RecordDict({PENDING: wire.to_array_record({"value": pending.value})})
            return _answer_with(message, value, site=pending.site, weight=pending.weight)
        except NonFiniteLossError as error:
            return _answer_with(message, loss=error.loss)
        _forget_others(context.state, tag)
        wire.save_client_state(context.state, kept, tag)
        return Message(wire.reply_records(reply), reply_to=message)

    @app.query("calibration")
    def calibration(message: Message, context: Context) -> Message:
        site, client, tag = _site(build, message, context)
        task, client_state = site.task, wire.load_client_state(context.state, tag)
        own = site.data.all_batches(client)
        rule = task.strategy.calibration_rule()
        seen = client_calibration(task, _read_received(site, message), client_state, own, rule)
        content = RecordDict({wire.METRICS: MetricRecord({wire.EXAMPLES: seen.examples})})
        layers = wire.write_stats(content, seen.stats)
        return _answer_with(message, content, client=client, layers=layers)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        site, client, tag = _site(build, message, context)
        client_states = {client: wire.load_client_state(context.state, tag)}
        adapt = float(str(wire.header(message.content)["adapt"]))
        state = _read_received(site, message).state
        scores = score_clients(site.task, state, client_states, site.data, [client], adapt=adapt)
        found = MetricRecord()
        for score in scores.values():
            found["accuracy"], found["loss"] = score.accuracy, score.loss
            found["examples"] = score.examples
            for name, value in score.metrics.items():
                found[f"{wire.OWN_METRIC}{name}"] = value
        return _answer_with(message, RecordDict({wire.METRICS: found}))

    return app


def _site(build: Build, message: Message, context: Context) -> tuple[Site, int, str]:
    said = wire.header(message.content)
    entry, seed, client = (int(str(said[key])) for key in ("entry", "seed", "client"))
    site = build(context, entry, seed)
    torch.set_num_threads(site.threads)
    return site, client, f".{entry}.{seed}"


def _read_received(site: Site, message: Message) -> Broadcast:
    return wire.align(wire.read_broadcast(message.content), site.task.initial_state)


def _forget_others(state: RecordDict, tag: str) -> None:
    """Forget the client states of other strategies and seeds: those runs are over."""
    for key in [k for k in state if k.startswith(f"{wire.HEADER}.") and not k.endswith(tag)]:
        del state[key]


def _answer_with(
    message: Message, content: RecordDict | None = None, **said: float | str | list[str]
) -> Message:
    found = content if content is not None else RecordDict()
    given = {key: value for key, value in said.items() if value != []}
    found[wire.HEADER] = ConfigRecord({"version": wire.VERSION, **given})
    return Message(found, reply_to=message)
