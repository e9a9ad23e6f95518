"""The server's round: faulty replies are rejected by name, and the round continues."""

from dataclasses import replace

import pytest
import torch

from fednorm import ClientState, Moments, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import PendingError, answer_exchange
from fednorm.core.messages import LayerStats, RejectedReply
from fednorm.errors import NonFiniteLossError, NoUsableReplyError
from support import ToyClients, task_of


@pytest.fixture
def started():
    task, clients = task_of("fbn", create_algorithm("dsgd", lr=0.05)), ToyClients()
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(3)
    ]
    return task, replies


def spoil(reply, path, **values):
    moments = replace(reply.stats[path].moments, **values)
    stats = {**reply.stats, path: LayerStats(moments, reply.stats[path].num_batches)}
    return replace(reply, stats=stats)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"var": torch.tensor([-1.0, 1, 1, 1]).double()}, "variance of layer 'stem.1' is negative"),
        (
            {"var": torch.tensor([float("inf"), 1, 1, 1]).double()},
            "variance of layer 'stem.1' is not finite",
        ),
        (
            {"mean": torch.tensor([float("nan"), 1, 1, 1]).double()},
            "mean of layer 'stem.1' is not finite",
        ),
    ],
)
def test_faulty_statistics_are_rejected_by_name(started, values, reason):
    task, replies = started
    bad = spoil(replies[1], "stem.1", **values)
    after = server_round(task, task.initial_state, [replies[0], bad, replies[2]])
    assert [(r.client, reason in r.reason) for r in after.rejected] == [(1, True)]
    honest = server_round(task, task.initial_state, [replies[0], replies[2]])
    for path, running in honest.running.items():
        assert torch.equal(after.running[path].mean, running.mean)
        assert torch.equal(after.running[path].var, running.var)
    for name, value in honest.weights.items():
        assert torch.equal(after.weights[name], value)


def test_a_faulty_update_and_a_count_of_nothing_are_rejected(started):
    task, replies = started
    name = next(iter(replies[0].update))
    nan = {**replies[0].update, name: replies[0].update[name] * float("nan")}
    bad = [replace(replies[0], update=nan), replace(replies[1], examples=0)]
    after = server_round(task, task.initial_state, [*bad, replies[2]])
    assert [r.client for r in after.rejected] == [0, 1]
    assert name in after.rejected[0].reason


def test_a_round_without_a_usable_reply_is_an_error(started):
    task, replies = started
    with pytest.raises(NoUsableReplyError, match=r"round 1 has no usable reply .*none arrived"):
        server_round(task, task.initial_state, [])
    with pytest.raises(NoUsableReplyError, match="client 0: it reports -1 examples"):
        server_round(task, task.initial_state, [replace(replies[0], examples=-1)])


def test_clients_with_the_same_fault_are_named_together():
    same = [RejectedReply(client, "it is late") for client in range(6)]
    error = NoUsableReplyError(3, [*same, RejectedReply(6, "it is large")])
    said = "clients 0, 1, 2, 3 and 2 more: it is late; client 6: it is large"
    assert str(error) == f"round 3 has no usable reply ({said})."


def test_an_empty_client_counts_for_nothing(started):
    task, replies = started
    empty = replies[1]
    for path in empty.stats:
        like = empty.stats[path].moments.mean
        empty = spoil(
            empty, path, count=0.0, mean=torch.zeros_like(like), var=torch.zeros_like(like)
        )
    after = server_round(task, task.initial_state, [replies[0], empty, replies[2]])
    honest = server_round(task, task.initial_state, [replies[0], replies[2]])
    for path, running in honest.running.items():
        torch.testing.assert_close(after.running[path].var, running.var)


def test_a_loss_that_is_not_finite_names_round_and_client():
    task, clients = task_of("fbn", create_algorithm("dsgd", lr=0.05)), ToyClients()
    batches = clients.batches(2, 1)
    broken = replace(batches, steps=[(x * float("inf"), y) for x, y in batches.steps])
    with pytest.raises(NonFiniteLossError, match="in round 1 at client 2"):
        client_round(task, broadcast(task, task.initial_state), ClientState(), broken)


def test_clients_that_wait_at_different_sites_are_an_error():
    value = torch.zeros(2)
    with pytest.raises(RuntimeError, match="same site"):
        answer_exchange([PendingError("a", value, 1.0), PendingError("b", value, 1.0)])


def test_moments_can_be_counted_with_a_tensor():
    one = Moments(torch.tensor(2.0), torch.zeros(1), torch.ones(1))
    assert float(one.merge(one).count) == 4
