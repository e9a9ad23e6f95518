"""Answers of nodes: each is taken by itself, and belongs to the node that was asked.

Flower's grids unpack the answers of all nodes in one call: bytes that cannot be unpacked end it for
all of them. And what a message says of its sender is written by the sender; the SuperLink compares
it with the question in a copy that is not the one that is unpacked. Here each answer is pulled in
a separate call.

If a user's app cannot work, the server says so once, with the lines to change. After a first answer
it no longer does: later failures of nodes may have other causes.
"""

import copy
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedXgbBagging, FedXgbCyclic, Strategy

from fednorm.core.messages import LARGEST, Reply, ServerState
from fednorm.core.replies.validation import ReplySchema, find_fault
from fednorm.core.round import find_remedy
from fednorm.core.task import Task
from fednorm.engines.flower import wire
from fednorm.errors import ConfigError, WireError

log = logging.getLogger("fednorm")

UNREADABLE = 900  # code of the error that replaces an unusable answer
_PAUSE = 3.0  # seconds between looks for answers, as in Flower's own grid


def is_unreadable(message: Message) -> bool:
    """Return whether a node did answer, but with an unusable message."""
    return bool(message.has_error() and message.error.code == UNREADABLE)


def read_reason(message: Message) -> str:
    """Return what a failed node reports, without the traceback of a simulated one."""
    said = str(message.error.reason).rpartition("occurred. Message: ")[2]
    return said.removesuffix("'>").strip()


def read_content(message: Message) -> RecordDict:
    """Return the content of a message, or raise WireError if it reports a failure."""
    if message.has_error():
        raise WireError(read_reason(message))
    return message.content


class CheckedGrid(Grid):
    """A grid around Flower's."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Set the run."""
        self.grid.set_run(*args, **kwargs)

    @property
    def run(self) -> Any:
        """The run."""
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a message."""
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to messages that have arrived."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the answers that arrive within `timeout` seconds.

        An answer that cannot be unpacked, or that says it is of another node, is an error with the
        code `UNREADABLE`.
        """
        sent = list(messages)
        pushed = set(self.grid.push_messages(sent))
        waiting = {m.metadata.message_id: m for m in sent if m.metadata.message_id in pushed}
        found: list[Message] = []
        until = None if timeout is None else time.monotonic() + timeout
        while waiting:
            arrived = self._pull(waiting)
            found += arrived.values()
            waiting = {number: m for number, m in waiting.items() if number not in arrived}
            if not waiting or (until is not None and time.monotonic() >= until):
                break
            time.sleep(getattr(self.grid, "pull_interval", _PAUSE))
        return found

    def _pull(self, waiting: dict[str, Message]) -> dict[str, Message]:
        """Return the answers that are there, by the message which each of them answers."""
        arrived: dict[str, Message] = {}
        for number, asked in waiting.items():
            try:
                answers = list(self.grid.pull_messages([number]))
            except Exception as error:  # noqa: BLE001 (of the bytes that a node sent)
                self.grid.get_node_ids()  # fails as well if the SuperLink cannot be reached
                said = f"it cannot be unpacked: {type(error).__name__}: {error}"
                arrived[number] = _refuse(asked, said)
            else:
                if answers:
                    arrived[number] = _check_sender(asked, answers[0])
        return arrived


def _check_sender(asked: Message, answer: Message) -> Message:
    node, said = asked.metadata.dst_node_id, answer.metadata.src_node_id
    if not answer.has_error() and said != node:
        return _refuse(asked, f"it says that it comes from node {said}")
    answer.metadata.__dict__["_src_node_id"] = node  # an error may be the SuperLink's
    return answer


def _refuse(asked: Message, reason: str) -> Message:
    return Message(Error(UNREADABLE, wire.clean_text(reason)), reply_to=asked)


@dataclass
class NodeNumbers:
    """The numbers by which sums over nodes are ordered; a node keeps its first one.

    Nodes choose a number each, so that a run can be repeated to the bit though Flower's node
    ids are drawn at random. It is not an identity: a taken one is not given to another node.
    """

    known: dict[int, int] = field(default_factory=dict)  # by node id

    def find(self, node: int, said: int) -> int:
        """Return the number of a node, which is what it says first if that is free."""
        if node not in self.known:
            taken = set(self.known.values())
            number = said if said not in taken else node
            while number in taken:
                number += 1
            self.known[node] = number
        return self.known[node]


def find_odd(contents: Sequence[RecordDict], weight: str) -> list[int]:
    """Return the places of contents with other records or metrics than most of them have.

    Flower's strategies refuse all replies of a round if one of them differs, or weighs nothing.
    """
    kinds = [_describe_records(content, weight) for content in contents]
    known = Counter(kind for kind in kinds if kind is not None)
    usual = known.most_common(1)[0][0] if known else None
    return [place for place, kind in enumerate(kinds) if kind is None or kind != usual]


def find_weight_key(around: Strategy) -> str:
    """Return the metric by which a strategy weighs replies; a wrapper has that of what it wraps."""
    inner = getattr(around, "strategy", around)
    return str(getattr(inner, "weighted_by_key", wire.EXAMPLES))


def average_metrics(around: Strategy, replies: list[Message]) -> MetricRecord | None:
    """Average the metrics that most replies have; other ones would make Flower refuse all."""
    if not isinstance(around, FedAvg):
        return None
    contents = [reply.content for reply in replies]
    odd = find_odd(contents, around.weighted_by_key)
    usual = [content for place, content in enumerate(contents) if place not in odd]
    return around.train_metrics_aggr_fn(usual, around.weighted_by_key) if usual else None


def _describe_records(content: RecordDict, weight: str) -> tuple[object, ...] | None:
    """Return the names of records and metrics; None if it cannot be averaged with any other."""
    if len(content.metric_records) != 1:
        return None
    ((name, metrics),) = content.metric_records.items()
    weighs = metrics.get(weight)
    if isinstance(weighs, list) or weighs is None or not 0 < weighs <= LARGEST:
        return None
    lengths = [(key, len(v) if isinstance(v, list) else -1) for key, v in metrics.items()]
    arrays = [(key, *sorted(record)) for key, record in content.array_records.items()]
    return name, tuple(sorted(lengths)), tuple(sorted(arrays))


def read_calibration(content: RecordDict, state: ServerState) -> Reply:
    """Return a client's answer to a query for its statistics."""
    said = wire.header(content)
    stats = wire.read_stats(content, said.layers(), state.running)
    return Reply(wire.integer(said, "client"), wire.examples_of(content), {}, {}, stats)


def read_reply(state: ServerState, content: RecordDict, wanted: ReplySchema) -> Reply:
    """Return the reply of an app of the user's, or raise WireError; `client` is what it says."""
    said = wire.header(content)
    (weights,) = _select_weights(content).array_records.values()
    new = wire.expect("the reply", wire.to_tensors(weights), state.weights)
    reply = Reply(
        client=wire.integer(said, "client"),
        examples=wire.examples_of(content),
        update={name: new[name] - state.weights[name] for name in wanted.update},
        buffers=wire.expect("the reply", wire.optional(content, wire.BUFFERS), state.buffers),
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


def strip_message(message: Message) -> Message:
    """Return a copy of a reply with weights and metrics alone."""
    bare = copy.copy(message)
    bare.content = _select_weights(message.content)
    return bare


_UNREACHED = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
}
UNPACK = "model = fednorm.flower.unpack(msg, Net(), context)"
_TRAIN = (
    f"a train function begins with `{UNPACK}` instead of load_state_dict, and ends with "
    "`return fednorm.flower.pack(model, msg, context, examples=len(trainloader.dataset))`."
)
_LEGACY = (
    "the ClientApp is a legacy one (client_fn, NumPyClient), which fednorm does not support; write "
    "@app.train() and @app.evaluate() functions, as in docs/flower.md."
)
# What an error of a node says, and what to do about it.
_HINTS = {
    "secagg": "SecAgg+ exists in Flower for legacy apps alone, and fednorm does not support it; "
    "remove the mod.",
    "fitins": _LEGACY,
    "evaluateins": _LEGACY,
    "exactly one ArrayRecord": "a mod of Flower's sees the weights alone if it is wrapped: "
    "mods=[fednorm.flower.weights_only(mod)].",
    "is not finite": "the training has diverged: choose a smaller learning rate, or another "
    "strategy.",
    "state_dict": _TRAIN,
    "record 'fednorm'": _TRAIN,
}
_LOCAL_STEPS = (
    "a node takes %d steps a round, and %s fixes its statistics within a round: plain FedAvg was "
    "ahead of it in such settings. 'alignbn' is for local steps; docs/local-epochs.md has the "
    "measurements."
)
_QUERY = """The ClientApp needs these lines:

@app.query("fednorm")
def measure(msg, context):
    # All of the node's data once.
    batches = [(batch["img"], batch["label"]) for batch in trainloader]
    return fednorm.flower.calibrate(
        msg, Net(), context, batches, examples=len(trainloader.dataset)
    )
"""


def is_unreached(reply: Message) -> bool:
    """Return whether a node was not reached, so that nothing is known about its app."""
    return reply.has_error() and reply.error.code in _UNREACHED


def list_failures(replies: Sequence[Message]) -> list[str]:
    """Return what nodes report whose app failed; nodes that were not reached report nothing."""
    failed = [m for m in replies if m.has_error() and not is_unreached(m)]
    return [f"node {m.metadata.src_node_id}: {read_reason(m)}" for m in failed]


def refuse_training(reasons: Sequence[str]) -> None:
    """Raise because no node of a first round has trained."""
    raise ConfigError(f"no node could train. {_find_hint(reasons[0])}{_quote(reasons[0])}")


def refuse_evaluation(strategy: str, reasons: Sequence[str]) -> None:
    """Raise if nodes tried to load into their plain model what does not fit there."""
    if any("state_dict" in reason for reason in reasons):
        raise ConfigError(
            f"no node could evaluate: the plain model is not what {strategy!r} trains. Write "
            f"`{UNPACK}` in the evaluate function instead of load_state_dict.{_quote(reasons[0])}"
        )


def refuse_calibration(strategy: str, reasons: Sequence[str]) -> None:
    """Raise because no node has measured its data."""
    lines = _QUERY if "No query function" in reasons[0] else ""
    raise ConfigError(
        f"no node measured the statistics of its data, which {strategy!r} needs. {lines}"
        f"{_quote(reasons[0])}"
    )


def warn_of_local_steps(task: Task, name: str, before: ServerState, after: ServerState) -> None:
    """Warn after the first round if nodes took local steps with fixed statistics."""
    steps = [r.num_batches - before.running[p].num_batches for p, r in after.running.items()]
    if before.round == 0 and max(steps, default=0) > 1 and find_remedy(task, before):
        log.warning(_LOCAL_STEPS, max(steps), name)


def explain_central(strategy: str) -> str:
    """Return what to do if evaluate_fn cannot load the arrays."""
    return (
        f"evaluate_fn could not load its arrays: the plain model is not what {strategy!r} trains. "
        "Test `model = strategy.model` there, the NormStrategy's own; it holds the same tensors."
    )


def refuse_server(server: Strategy | None) -> None:
    """Raise if a strategy cannot decide on the weights of a model."""
    inner: object = server
    while inner is not None:
        if not isinstance(inner, Strategy):
            raise ConfigError(
                f"server must be one of flwr.serverapp.strategy, but is {type(inner).__name__} of "
                f"{type(inner).__module__}; legacy strategies are not supported."
            )
        if isinstance(inner, FedXgbBagging | FedXgbCyclic):
            raise ConfigError(
                f"{type(inner).__name__} combines trees, which have no normalization layers; use "
                "it by itself."
            )
        inner = getattr(inner, "strategy", None)  # of a wrapper


def _find_hint(reason: str) -> str:
    return next((hint for words, hint in _HINTS.items() if words in reason), "")


def _quote(reason: str) -> str:
    return f"\nThe first report, of {reason[:300]}"
