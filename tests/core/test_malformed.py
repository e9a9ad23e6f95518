"""No reply, however malformed, takes the server down or changes its state."""

import random
from dataclasses import replace

import pytest
import torch

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import LayerStats, Reply, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.replies.validation import ReplySchema, find_fault
from fednorm.core.round import client_calibration, server_calibration
from fednorm.errors import NoUsableReplyError
from support import ToyClients, task_of

NAN, INF = float("nan"), float("inf")
JUNK = [None, "much" * 500, [], {}, object(), True, 1j, b"", torch.zeros(2, 3), NAN, -1]
SPOILT = [{"metrics": None}, {"metrics": []}, {"loss": NAN}, {"loss": "low"}]
SPOILT += [{"clients": many} for many in (0, -1, 2, 1e300, NAN, *JUNK[:5])]


def started(name, step, **fields):
    task, clients = task_of(name, step, **fields), ToyClients()
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(3)
    ]
    return task, replies


KINDS = {
    "pooled": lambda: started("fbn", create_algorithm("dsgd", lr=0.05)),
    "averaged": lambda: started(
        "naive", create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global")
    ),
    "frozen": lambda: started(
        "fixbn", create_algorithm("dsgd", lr=0.05), freeze_round=0, freeze_affine=True
    ),
    "backward": lambda: started("dualbn", create_algorithm("dsgd", lr=0.05)),
    "control variates": lambda: started("fbn", create_algorithm("scaffold", lr=0.05)),
    "steps": lambda: started("fbn", create_algorithm("fednova", lr=0.05, server="adam")),
    "regularizer": lambda: started("fbn", create_algorithm("feddyn", lr=0.05)),
    "cumulative": lambda: started("fbn", create_algorithm("dsgd", lr=0.05), stats_momentum=None),
}


def changed(draw, tensors):
    """Return the tensors with something wrong in one of them."""
    tensors = dict(tensors)
    name = draw.choice(list(tensors))
    value = tensors[name]
    wrong = [
        lambda: tensors.pop(name),
        lambda: tensors.update({f"{name}.more": value}),
        lambda: tensors.update({draw.choice(["x", 7, None, ("a",)]): value}),
        lambda: tensors.update({name: value[None]}),
        lambda: tensors.update({name: value.new_empty(0)}),
        lambda: tensors.update({name: value.flatten()[:1].repeat(5, 1)}),
        lambda: tensors.update({name: value.float()}),
        lambda: tensors.update({name: value.long()}),
        lambda: tensors.update({name: value.to(torch.complex128)}),
        lambda: tensors.update({name: value.to("meta")}),
        lambda: tensors.update({name: value.to_sparse()}),
        lambda: tensors.update({name: value.clone().requires_grad_()}),
        lambda: tensors.update({name: spoiled(draw, value)}),
        lambda: tensors.update({name: draw.choice(JUNK)}),
        tensors.clear,
    ]
    draw.choice(wrong)()
    return tensors


def spoiled(draw, value):
    """Return a tensor with one element that is no number."""
    flat = value.clone().flatten()
    flat[draw.randrange(len(flat))] = draw.choice([NAN, INF, -INF])
    return flat.view(value.shape)


def bad_sent(draw, sent):
    """Return what an algorithm sends with the update, with something wrong in it."""
    if not sent:
        return {"x": torch.zeros(1)}
    name = draw.choice(list(sent))
    value = sent[name]
    wrong = [value[None], value.float(), value.to("meta"), spoiled(draw, value), *JUNK]
    return {**sent, name: draw.choice(wrong)}


def bad_moments(draw, m):
    wrong = [
        lambda: replace(m, count=draw.choice([-1.0, NAN, INF, -INF, 1e300, 2**60, *JUNK[:10]])),
        lambda: replace(m, mean=draw.choice([spoiled(draw, m.mean), m.mean[:-1], m.mean.float()])),
        lambda: replace(m, mean=torch.full_like(m.mean, 1e200)),
        lambda: replace(m, mean=draw.choice(JUNK), var=draw.choice(JUNK)),
        lambda: replace(m, var=torch.full_like(m.mean, -1e-3)),
        lambda: replace(m, var=spoiled(draw, m.mean)),
        lambda: replace(m, var=m.mean.abs().repeat(2, 1)),
        lambda: draw.choice(JUNK),
    ]
    return draw.choice(wrong)()


def bad_stats(draw, reply):
    if not reply.stats:  # nothing is to be reported in this round
        return {"stem.1": LayerStats(Moments(4.0, torch.zeros(4), torch.ones(4)), 1)}
    stats = dict(reply.stats)
    path = draw.choice(list(stats))
    report = stats[path]
    wrong = [
        lambda: {**stats, path: replace(report, moments=bad_moments(draw, report.moments))},
        lambda: {
            **stats,
            path: replace(report, num_batches=draw.choice([-1, 0, 2**62, 1.5, *JUNK])),
        },
        lambda: {**stats, path: replace(report, samples=draw.choice([0, -1, 1e-300, NAN, *JUNK]))},
        lambda: {
            **stats,
            path: replace(report, more=draw.choice([(report.moments,) * 9, (None,), *JUNK])),
        },
        lambda: {**stats, path: draw.choice(JUNK)},
        lambda: {**stats, f"{path}.more": report},
        lambda: {**stats, 3: report},
    ]
    return draw.choice(wrong)()


def malformed(draw, reply):
    wrong = [
        lambda: draw.choice(JUNK),
        lambda: replace(reply, client=draw.choice([None, "0", -1, 99, 1.0, NAN, [], object()])),
        lambda: replace(reply, examples=draw.choice([0, -3, 2**60, 1.5, INF, *JUNK])),
        lambda: replace(reply, update=draw.choice([None, [], 3, "x", torch.zeros(3)])),
        lambda: replace(reply, update=changed(draw, reply.update)),
        lambda: replace(reply, update=changed(draw, reply.update)),
        lambda: replace(reply, buffers=draw.choice([None, [1], {"level": torch.zeros(1)}])),
        lambda: replace(reply, stats=draw.choice([None, [], 3, {"x": None}])),
        lambda: replace(reply, stats=bad_stats(draw, reply)),
        lambda: replace(reply, stats=bad_stats(draw, reply)),
        lambda: replace(reply, momentum=draw.choice([None, 3, {"x": torch.zeros(1)}])),
        lambda: replace(reply, momentum=bad_sent(draw, reply.momentum)),
        lambda: replace(reply, **draw.choice(SPOILT)),
    ]
    return draw.choice(wrong)()


def tensors_of(state):
    yield from state.weights.values()
    yield from state.buffers.values()
    yield from state.momentum.values()
    yield from state.strategy_state.values()
    for running in state.running.values():
        yield from (running.mean, running.var, torch.tensor(running.num_batches))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_malformed_replies_change_nothing(kind):
    draw = random.Random(kind)  # noqa: S311 (a test)
    task, replies = KINDS[kind]()
    good = replies[0]
    alone = server_round(task, task.initial_state, [good])
    expected = list(tensors_of(alone))
    for _ in range(100):
        bad = [malformed(draw, draw.choice(replies[1:])) for _ in range(20)]
        listed = [*bad, good]
        draw.shuffle(listed)
        after = server_round(task, task.initial_state, listed, asked=[0, 1, 2])
        assert len(after.rejected) == 20
        assert all(0 < len(one.reason) <= 300 for one in after.rejected)
        assert all(map(torch.equal, tensors_of(after), expected))


def answers_of(name, rule="mean", **fields):
    task, clients = task_of(name, create_algorithm("dsgd", lr=0.05), **fields), ToyClients()
    task = replace(task, statistics_aggregator=create_aggregator(rule, f=1))
    received, rule = broadcast(task, task.initial_state), task.strategy.calibration_rule()
    return task, [
        client_calibration(task, received, ClientState(), clients.all_batches(c), rule)
        for c in range(3)
    ]


CALIBRATED = {
    "hbn": lambda: answers_of("hbn"),
    "heterofl": lambda: answers_of("heterofl"),
    "pooled": lambda: answers_of("heterofl", statistics="pool"),
    "alignbn": lambda: answers_of("alignbn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALIBRATED)
def test_malformed_answers_to_a_calibration_change_nothing(kind):
    draw = random.Random(kind)  # noqa: S311 (a test)
    task, answers = CALIBRATED[kind]()
    alone = server_calibration(task, task.initial_state, answers[:1])
    expected = list(tensors_of(alone))
    for _ in range(50):
        bad = [bad_answer(draw, draw.choice(answers[1:])) for _ in range(20)]
        listed = [*bad, answers[0]]
        draw.shuffle(listed)
        after = server_calibration(task, task.initial_state, listed, asked=[0, 1, 2])
        assert len(after.rejected) == 20
        assert all(map(torch.equal, tensors_of(after), expected))


def bad_answer(draw, answer):
    wrong = [
        lambda: replace(answer, stats=bad_stats(draw, answer)),
        lambda: replace(answer, client=draw.choice([None, "0", -1, 99, 1.0, NAN, [], object()])),
        lambda: replace(answer, examples=draw.choice([0, -3, 2**60, 1.5, INF, *JUNK])),
        lambda: replace(answer, update={"weight": torch.zeros(2)}),
        lambda: replace(answer, **draw.choice(SPOILT)),
    ]
    return draw.choice([wrong[0], *wrong])()


def test_surplus_answers_to_a_calibration_are_rejected_and_do_not_lower_f():
    task, answers = answers_of("heterofl", "median")
    stranger = replace(answers[2], client=7)
    listed = [*answers, answers[0], stranger, stranger]
    after = server_calibration(task, task.initial_state, listed, asked=range(3))
    assert [(one.client, one.reason) for one in after.rejected] == [
        (0, "it has answered already"),
        (7, "it was not asked in this round"),
        (7, "it was not asked in this round"),
    ]
    two = server_calibration(task, task.initial_state, [*answers[:2], stranger], asked=range(3))
    same = tensors_of(task.initial_state)
    assert all(map(torch.equal, tensors_of(two), same))  # not adopted: f = 1 needs three


def test_a_client_that_was_not_asked_and_a_second_reply_are_rejected():
    task, replies = KINDS["pooled"]()
    after = server_round(task, task.initial_state, [*replies, replies[1]], asked=[0, 1])
    assert [(r.client, r.reason) for r in after.rejected] == [
        (1, "it has answered already"),
        (2, "it was not asked in this round"),
    ]
    two = server_round(task, task.initial_state, replies[:2])
    assert all(map(torch.equal, tensors_of(after), tensors_of(two)))


@pytest.mark.parametrize("kind", ["pooled", "averaged", "frozen"])
def test_an_answer_in_the_name_of_another_client_is_a_second_one(kind):
    task, replies = KINDS[kind]()
    forged = replace(replies[2], client=0)
    after = server_round(task, task.initial_state, [*replies[:2], forged], asked=[0, 1, 2])
    assert [(r.client, r.reason) for r in after.rejected] == [(0, "it has answered already")]
    two = server_round(task, task.initial_state, replies[:2])
    assert all(map(torch.equal, tensors_of(after), tensors_of(two)))


@pytest.mark.parametrize("kind", ["pooled", "averaged", "frozen"])
def test_an_answer_to_a_round_that_is_over_is_rejected(kind):
    task, replies = KINDS[kind]()
    state = server_round(task, task.initial_state, replies)
    received = broadcast(task, state)
    now = [
        client_round(task, received, ClientState(), ToyClients().batches(c, 2))[0] for c in (0, 1)
    ]
    after = server_round(task, state, [*now, replies[2]], asked=[0, 1, 2])
    assert [(r.client, r.reason) for r in after.rejected] == [
        (2, "it answers round 1 instead of 2")
    ]
    two = server_round(task, state, now)
    assert all(map(torch.equal, tensors_of(after), tensors_of(two)))


def test_a_rejection_names_the_layer():
    task, replies = KINDS["pooled"]()
    report = replies[1].stats["stem.1"]
    bad = replace(report, moments=replace(report.moments, count=-2.0))
    spoilt = replace(replies[1], stats={**replies[1].stats, "stem.1": bad})
    (found,) = server_round(task, task.initial_state, [replies[0], spoilt]).rejected
    assert (found.client, found.where) == (1, "stem.1")
    assert found.reason == "the count of layer 'stem.1' is -2.0"


def test_a_layer_that_one_client_did_not_use_is_merged_over_the_others():
    task, replies = KINDS["pooled"]()
    less = {path: report for path, report in replies[1].stats.items() if path != "stem.1"}
    after = server_round(task, task.initial_state, [replies[0], replace(replies[1], stats=less)])
    alone = server_round(task, task.initial_state, [replies[0]])
    both = server_round(task, task.initial_state, replies[:2])
    assert not after.rejected
    for path, running in after.running.items():
        source = alone if path == "stem.1" else both
        assert torch.equal(running.mean, source.running[path].mean)


def test_fewer_good_replies_than_are_needed_are_an_error():
    task, replies = KINDS["pooled"]()
    with pytest.raises(
        NoUsableReplyError, match="round 1 has only 1 usable reply, fewer than it needs"
    ):
        server_round(task, task.initial_state, replies[:1], minimum=2)
    bad = replace(replies[1], examples=0)
    with pytest.raises(NoUsableReplyError, match="client 1: it reports 0 examples") as caught:
        server_round(task, task.initial_state, [replies[0], bad], minimum=2)
    assert [one.client for one in caught.value.rejected] == [1]


def test_a_robust_rule_does_not_believe_a_single_counter():
    task, replies = KINDS["pooled"]()
    median = create_aggregator("median", f=1)
    task = replace(task, aggregator=median, statistics_aggregator=median)
    report = replies[2].stats["stem.1"]
    forged = replace(
        replies[2], stats={**replies[2].stats, "stem.1": replace(report, num_batches=2**30)}
    )
    after = server_round(task, task.initial_state, [*replies[:2], forged])
    assert not after.rejected
    assert after.running["stem.1"].num_batches == 1


@pytest.mark.parametrize("count", [float("inf"), float("nan"), -1.0])
def test_an_impossible_count_is_rejected(count):
    report = LayerStats(Moments(count, torch.zeros(1), torch.ones(1)), 1)
    expected = ReplySchema({}, running={"x": RunningStats(torch.zeros(1), torch.ones(1), 0)})
    assert "count of layer 'x'" in find_fault(Reply(0, 1, {}, {}, {"x": report}), expected)[1]


def test_a_buffer_that_is_not_finite_is_rejected():
    expected = ReplySchema({}, buffers={"level": torch.tensor(0.0)})
    reply = Reply(0, 1, {}, {"level": torch.tensor(float("nan"))}, {})
    assert find_fault(reply, expected) == ("level", "the update of 'level' is not finite")
