"""How the server combines what many clients send, and whom it believes."""

from dataclasses import dataclass, replace

import pytest
import torch

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.aggregation import Aggregator, combine_tensors, weighted_mean
from fednorm.errors import NoUsableReplyError
from support import ToyClients, task_of


@dataclass(frozen=True)
class Closest(Aggregator):
    """A robust rule that takes the whole vector of the client nearest to 0."""

    f: int = 1

    def __call__(self, values, weights):
        del weights
        return values[values.flatten(1).norm(dim=1).argmin()]

    def check(self, n):
        if n < 2 * self.f + 1:
            raise ValueError(f"{n} are too few")

    def without(self, faulty):
        return Closest(max(0, self.f - faulty))


def test_a_robust_rule_sees_all_tensors_as_one_vector():
    parts = [
        {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[9.0]])},
        {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([[1.0]])},
        {"a": torch.tensor([5.0, 5.0]), "b": torch.tensor([[0.0]])},
    ]
    found = combine_tensors(parts, [1, 1, 1], Closest())
    assert found["a"].tolist() == [2.0, 2.0]
    assert found["b"].tolist() == [[1.0]]
    mean = combine_tensors(parts, [2, 1, 1], weighted_mean)
    assert mean["a"].tolist() == [1.75, 2.25]


def test_integers_are_the_maximum_or_for_a_robust_rule_the_median():
    parts = [{"n": torch.tensor(n)} for n in (3, 4, 1000)]
    assert int(combine_tensors(parts, [1, 1, 1], weighted_mean)["n"]) == 1000
    assert int(combine_tensors(parts, [1, 1, 1], Closest())["n"]) == 4


def test_what_some_lack_is_combined_over_the_others_if_they_are_enough():
    parts = [{"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}, {"a": torch.tensor([3.0])}]
    assert {k: v.item() for k, v in combine_tensors(parts, [1, 1], weighted_mean).items()} == {
        "a": 2.0,
        "b": 1.0,
    }
    three = [*parts, {"a": torch.tensor([2.0])}]
    assert set(combine_tensors(three, [1, 1, 1], Closest())) == {"a"}


@pytest.fixture
def started():
    task = task_of("fbn", create_algorithm("dsgd", lr=0.05))
    clients = ToyClients(sizes=(4, 4, 4, 4, 4))
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(5)
    ]
    rule = create_aggregator("trimmed_mean", 2)
    return replace(task, aggregator=rule, statistics_aggregator=rule), replies


def test_a_robust_rule_cannot_be_kept_from_a_layer_by_saying_nothing(started):
    task, replies = started
    for how in ("absent", "count of 0"):
        stats = dict(replies[1].stats)
        report = stats.pop("stem.1")
        if how == "count of 0":
            stats["stem.1"] = replace(report, moments=replace(report.moments, count=0.0))
        silent = replace(replies[1], stats=stats)
        after = server_round(task, task.initial_state, [silent, *replies[2:]], asked=range(5))
        (found,) = after.rejected
        assert (found.client, found.where) == (1, "stem.1")
        assert after.running["stem.1"].num_batches == 1


def test_faulty_replies_leave_fewer_byzantine_clients_but_strangers_do_not(started):
    task, replies = started
    bad = [replace(reply, examples=0) for reply in replies[:2]]
    after = server_round(task, task.initial_state, [*bad, *replies[2:]], asked=range(5))
    assert after.round == 1
    # Two replies of clients that were not asked, and a second reply, say nothing of the others.
    strangers = [replace(reply, client=90 + reply.client) for reply in replies]
    with pytest.raises(NoUsableReplyError, match="only 3 usable replies, fewer than it needs"):
        server_round(
            task,
            task.initial_state,
            [*replies[2:], *strangers, replies[2]],
            asked=range(5),
        )
