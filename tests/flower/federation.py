"""Flower's nodes in this process; all that passes goes through Flower's own serialisation."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


def carried(message):
    """Return a message as it comes out at the other end of a wire."""
    return message_from_proto(
        ProtoMessage.FromString(message_to_proto(message).SerializeToString())
    )


def unpack(message):
    """Return a message as a SuperLink's grid makes it from the objects that a node sent.

    Who sent it is in them as well: the sender writes it. A dictionary is such objects, the message
    first.
    """
    objects = message
    if isinstance(message, Message):
        found = get_all_nested_objects(message)
        objects = {number: found[number].deflate() for number in reversed(found)}
    return inflate_object_from_contents(next(iter(objects)), dict(objects))


def _kept(context):
    return context_from_proto(
        ProtoContext.FromString(context_to_proto(context).SerializeToString())
    )


class Nodes(Grid):
    """A grid whose nodes run a ClientApp when they get a message."""

    def __init__(self, app, count, node_configs=None, run_config=None):
        self.app, self.lost, self.sent, self.failed = app, set(), [], []
        self.waiting, self.forge = {}, {}  # answers by message; what a node makes of its answers
        # What a runtime says to a ServerApp before it starts.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        configs = node_configs or [{"partition-id": i} for i in range(count)]
        # Ids in another order than partitions, as a SuperLink draws them at random.
        self.contexts = {
            1000 - i: Context(7, 1000 - i, configs[i], RecordDict(), dict(run_config or {}))
            for i in range(count)
        }

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        """Let nodes answer at once; their answers wait to be pulled."""
        numbers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.waiting)}"
            self.waiting[message.metadata.message_id] = self._answer(message)
            numbers.append(message.metadata.message_id)
        return numbers

    def pull_messages(self, message_ids):
        found = [self.waiting.pop(number) for number in message_ids if number in self.waiting]
        self.waiting |= {f"pulled {len(self.waiting)}": None for _ in found}  # no number twice
        for answer in found:
            if isinstance(answer, Exception):  # Flower cannot unpack it
                raise answer
        return [answer for answer in found if answer is not None]

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        return list(self.pull_messages(self.push_messages(messages)))

    def _answer(self, message):
        node = message.metadata.dst_node_id
        arrived = carried(message)
        arrived.metadata.__dict__["_message_id"] = f"{len(self.sent)}"
        self.sent.append(arrived)
        if node in self.lost:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "it is gone"), reply_to=arrived)
        context = self.contexts[node]
        try:
            answer = self.app(arrived, context)
            answer = self._forge(node, arrived, answer) if node in self.forge else carried(answer)
        except Exception as error:  # noqa: BLE001 (a SuperNode reports any)
            answer = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=arrived)
            self.failed.append(answer)
            return answer
        self.contexts[node] = _kept(context)
        self.sent.append(answer)
        return answer

    def _forge(self, node, arrived, answer):
        """Return what a hostile node sends as the server's side of Flower unpacks it, or fails."""
        try:
            return unpack(self.forge[node](arrived, answer))
        except Exception as error:  # noqa: BLE001 (so do bytes that a hostile node sends)
            return error
