"""Flower's nodes in this process; all that passes goes through Flower's own serialisation."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


def carried(message):
    """Return a message as it comes out at the other end of a wire."""
    return message_from_proto(
        ProtoMessage.FromString(message_to_proto(message).SerializeToString())
    )


def _kept(context):
    return context_from_proto(
        ProtoContext.FromString(context_to_proto(context).SerializeToString())
    )


class Nodes(Grid):
    """A grid whose nodes run a ClientApp when they get a message."""

    def __init__(self, app, count, node_configs=None, run_config=None):
        self.app, self.lost, self.sent, self.failed = app, set(), [], []
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
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        return [answer for message in messages if (answer := self._answer(message)) is not None]

    def _answer(self, message):
        node = message.metadata.dst_node_id
        arrived = carried(message)
        arrived.metadata.__dict__["_message_id"] = f"{len(self.sent)}"
        self.sent.append(arrived)
        if node in self.lost:
            return None
        context = self.contexts[node]
        try:
            answer = carried(self.app(arrived, context))
        except Exception as error:  # noqa: BLE001 (a SuperNode reports any)
            answer = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=arrived)
            self.failed.append(answer)
            return answer
        self.contexts[node] = _kept(context)
        self.sent.append(answer)
        return answer
