"""Secure sums: the server's round from integers that were added up, against rounds on replies."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import LayerStats, Reply, RunningStats, ServerState
from fednorm.core.moments import Moments
from fednorm.core.replies import secure_sum
from fednorm.core.replies.secure_sum import (
    EncodedReply,
    Encoding,
    count_calls,
    sum_calibration,
    sum_replies,
)
from fednorm.core.replies.validation import ReplySchema
from fednorm.core.round import client_calibration, reply_schema, server_calibration
from fednorm.errors import NoUsableReplyError
from fednorm.strategies import STRATEGIES
from support import ToyClients, nested_model, task_of

UNEQUAL = ToyClients(sizes=(2, 7, 4), steps=2)
DSGD = create_algorithm("dsgd", lr=0.05, momentum=0.9)
FEDAVG = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global")
ADDITIVE = sorted(
    name for name, cls in STRATEGIES.items() if cls.merges_sums is not False and name != "fedtan"
)
ULP = 2.0**-52


def collect_replies(task, state=None, clients=UNEQUAL):
    received = broadcast(task, state or task.initial_state)
    return [
        client_round(task, received, ClientState(), clients.batches(c, received.round))[0]
        for c in clients.all()
    ]


def small_reply(client=0, examples=3, loss=0.5, **parts):
    update = {"w": torch.tensor([0.25, -1.5])}
    return Reply(
        client, examples, **{"update": update, "buffers": {}, "stats": {}, **parts}, loss=loss
    )


def sum_plain(encoding, replies):
    made = [encoding.encode(reply) for reply in replies]
    assert all(isinstance(one, EncodedReply) for one in made), made
    total = made[0]
    for one in made[1:]:
        total = total.add(one)
    return total


# The oracle: Python's integers and fractions, from the formulas.


def to_fixed(value, bits):
    return round(Fraction(value) * 2**bits)


def read_signed(word, bits):
    word %= 2**bits
    return word - 2**bits if word >= 2 ** (bits - 1) else word


def bound_moments(weights, mean, square, n):
    """Return by how much a pooled mean and variance may be off, from n roundings to 2^-40."""
    error, weight = n * 2.0**-41, sum(weights)
    off = error * (1 + mean.abs()) / (weight - error) + 4 * ULP * (1 + mean.abs())
    off_square = error * (1 + square) / (weight - error) + 8 * ULP * (1 + square)
    return off, off_square + off * (2 * mean.abs() + off)


def test_integers_are_those_of_the_formulas():
    task = task_of("fbn", DSGD, model=nested_model().float())
    clients = [
        replace(own, steps=[(x.float(), y) for x, y in own.steps])
        for own in (UNEQUAL.batches(c, 1) for c in UNEQUAL.all())
    ]
    state = task.initial_state
    received = broadcast(task, state)
    replies = [client_round(task, received, ClientState(), own)[0] for own in clients]
    expected = reply_schema(task, state)
    encoding = Encoding(expected, 3, "values", count_calls(replies, expected.running))
    words, wide = [], []
    for reply in replies:
        numbers = [reply.examples, Fraction(reply.examples) * Fraction(reply.loss)]
        for tensor in reply.update.values():
            numbers += [reply.examples * Fraction(v) for v in tensor.flatten().tolist()]
        words.append([to_fixed(v, 30) for v in numbers])
        sums = []
        for path, report in reply.stats.items():
            n, weight = report.moments.count, reply.examples * report.moments.count / report.samples
            shared = state.running[path]
            shifts = [
                Fraction(m) - Fraction(r)
                for m, r in zip(report.moments.mean.tolist(), shared.mean.tolist(), strict=True)
            ]
            squares = [
                Fraction(v) + d * d
                for v, d in zip(report.moments.var.tolist(), shifts, strict=True)
            ]
            sums += [1, report.num_batches - shared.num_batches, n, weight]
            sums += [Fraction(weight) * v for v in (*shifts, *squares)]
        wide.append([to_fixed(v, 40) for v in sums])
    total = sum_plain(encoding, replies)
    got = [word % 2**64 for word in total.tensors.tolist()]
    assert got == [sum(column) % 2**64 for column in zip(*words, strict=True)]
    assert min(map(sum, zip(*words, strict=True))) < 0  # of which some are negative
    for found, column in zip(total.statistics, zip(*wide, strict=True), strict=True):
        apart = read_signed(found - sum(column), 128)
        assert abs(apart) <= 3 + abs(sum(column)) * ULP  # a sum of squares has more than 53 bits
    # and what the server makes of them, in fractions
    reply = encoding.decode(total, 3)
    examples = Fraction(read_signed(sum(w[0] for w in words), 64), 2**30)
    assert reply.examples == examples == sum(r.examples for r in replies)
    first = next(iter(reply.update.values())).flatten().tolist()
    for i, value in enumerate(first):
        exact = Fraction(read_signed(sum(w[2 + i] for w in words), 64), 2**30) / examples
        assert value == pytest.approx(float(exact), rel=1e-6, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DSGD, FEDAVG], ids=["dsgd", "fedavg"])
@pytest.mark.parametrize("name", ADDITIVE)
def test_the_state_is_that_of_the_replies_up_to_quantisation(name, algorithm):
    task = task_of(name, algorithm)
    state, clients = task.initial_state, replace(UNEQUAL, steps=1 if algorithm is DSGD else 2)
    for _ in range(2):  # the second round from statistics that are not 0 and 1
        replies = collect_replies(task, state, clients)
        plain = server_round(task, state, replies)
        summed = sum_replies(task, state, replies)
        secure = server_round(replace(task, secure=True), state, [summed.reply])
        assert_within_bounds(task, replies, plain, secure, state)
        examples = [r.examples for r in replies]
        loss = sum(e * r.loss for e, r in zip(examples, replies, strict=True)) / sum(examples)
        assert summed.reply.loss == pytest.approx(loss, abs=3 * 2.0**-31)
        state = plain


def assert_within_bounds(task, replies, plain, secure, before):
    """Compare two states; a step of the server multiplies errors by 1 at most."""
    n, total = len(replies), sum(r.examples for r in replies)
    for part in ("weights", "momentum"):
        one, other = getattr(plain, part), getattr(secure, part)
        assert one.keys() == other.keys()
        for name, value in one.items():
            bound = n * 2.0**-31 / total + 4 * ULP * (1 + value.abs())
            assert ((other[name] - value).abs() <= bound).all(), name
    for path, running in plain.running.items():
        found, shared = secure.running[path], before.running[path]
        assert found.num_batches == running.num_batches
        reports = [r.stats[path].with_weight(r.examples) for r in replies if path in r.stats]
        if not reports:
            assert torch.equal(found.mean, running.mean)
            continue
        weights = [r.examples for r in replies]
        if task.strategy.statistics == "pool":
            weights = [r.moments.mass for r in reports]
        shift = max((r.moments.mean - shared.mean).abs().max() for r in reports)
        largest = [r.moments.var.max() for r in reports if r.moments.var.numel()] or [shift * 0]
        off, off_var = bound_moments(weights, shift, max(largest) + shift**2, len(reports))
        assert ((found.mean - running.mean).abs() <= off).all(), path
        # The unbiased variance is at most twice the biased one.
        assert ((found.var - running.var).abs() <= 2 * off_var).all(), path


@pytest.mark.parametrize("fraction", [8, 16])
def test_the_bound_is_that_of_the_scale(fraction, monkeypatch):
    task = task_of("fbn", DSGD)
    replies = collect_replies(task, clients=replace(UNEQUAL, steps=1))
    plain = server_round(task, task.initial_state, replies)
    monkeypatch.setattr(secure_sum, "FRACTION", fraction)
    summed = sum_replies(task, task.initial_state, replies).reply
    secure = server_round(replace(task, secure=True), task.initial_state, [summed])
    bound = 3 * 2.0 ** -(fraction + 1) / sum(r.examples for r in replies)
    means = {
        name: sum(r.examples * r.update[name] for r in replies) / sum(r.examples for r in replies)
        for name in summed.update
    }
    off = max(float((summed.update[n] - mean).abs().max()) for n, mean in means.items())
    assert bound / 10 < off <= bound * (1 + 1e-9)
    assert any(not torch.equal(plain.weights[n], secure.weights[n]) for n in plain.weights)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("heterofl", {}),
        ("heterofl", {"statistics": "pool"}),
        ("hbn", {}),
        ("alignbn", {}),
        ("fedfn", {"base": "heterofl"}),
    ],
)
def test_a_calibration_is_that_of_the_answers(name, fields):
    task = task_of(name, DSGD, **fields)
    state, rule = task.initial_state, task.strategy.calibration_rule()
    received = broadcast(task, state)
    answers = [
        client_calibration(task, received, ClientState(), UNEQUAL.all_batches(c), rule)
        for c in UNEQUAL.all()
    ]
    plain = server_calibration(task, state, answers)
    summed = sum_calibration(task, state, answers)
    secure = server_calibration(replace(task, secure=True), state, [summed.reply])
    for path, running in plain.running.items():
        found = secure.running[path]
        torch.testing.assert_close(found.mean, running.mean, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(found.var, running.var, rtol=1e-12, atol=1e-10)
        assert found.num_batches == running.num_batches


def test_masks_that_cancel_change_nothing():
    """What a protocol would do: random integers of all words, whose sum is 0 modulo the word."""
    task = task_of("naive", DSGD)
    replies = collect_replies(task)
    expected = reply_schema(task, task.initial_state)
    encoding = Encoding(expected, 3, "examples", count_calls(replies, expected.running))
    plain = sum_plain(encoding, replies)
    rng = torch.Generator().manual_seed(0)
    size, wide = plain.tensors.shape, len(plain.statistics)
    masks = [
        EncodedReply(
            torch.randint(-(2**63), 2**63 - 1, size, generator=rng),
            tuple(m << 65 for m in torch.randint(2**62, (wide,), generator=rng).tolist()),
        )
        for _ in range(2)
    ]
    opposite = EncodedReply(
        -masks[0].tensors - masks[1].tensors,
        tuple(-a - b for a, b in zip(masks[0].statistics, masks[1].statistics, strict=True)),
    )
    sent = [
        encoding.encode(reply).add(mask)
        for reply, mask in zip(replies, [*masks, opposite], strict=True)
    ]
    assert not torch.equal(sent[0].tensors, encoding.encode(replies[0]).tensors)
    total = sent[0].add(sent[1]).add(sent[2])
    assert torch.equal(total.tensors, plain.tensors)
    assert total.statistics == plain.statistics


@pytest.mark.parametrize("clients", [2, 3, 7, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_of_all_clients_do_not_overflow(clients, sign):
    expected = ReplySchema({"w": torch.zeros(2, dtype=torch.float64)})
    most = 2.0**32 / clients  # of examples × update
    encoding = Encoding(expected, clients, "values", {})
    inside = small_reply(examples=1, update={"w": torch.tensor([sign * most * 0.999999, 0.0])})
    one = encoding.encode(inside)
    total = EncodedReply(torch.zeros_like(one.tensors), ())
    for _ in range(clients):
        total = total.add(one)
    reply = encoding.decode(total, clients)
    torch.testing.assert_close(reply.update["w"], inside.update["w"].double())
    beyond = small_reply(examples=1, update={"w": torch.tensor([sign * most * 1.0001, 0.0])})
    where, reason = encoding.encode(beyond)
    assert where == "w"
    assert f"but {most:.3g} at most can be encoded" in reason
    assert f"the sum over {clients} clients does not overflow" in reason


def test_a_client_that_cannot_be_encoded_is_left_out_by_name():
    task = task_of("fbn", DSGD)
    replies = collect_replies(task)
    first = next(iter(replies[1].update))
    large = {**replies[1].update, first: replies[1].update[first] + 2.0**33}
    cases = {
        "'stem.0.weight', as it is summed, is 6.01e+10": replace(replies[1], update=large),
        "'examples', as it is summed, is 9.01e+15": replace(replies[1], examples=2**53),
        "is not finite": replace(replies[1], update={**large, first: large[first] * torch.inf}),
    }
    without = sum_replies(task, task.initial_state, [replies[0], replies[2]]).reply
    for reason, bad in cases.items():
        summed = sum_replies(task, task.initial_state, [replies[0], bad, replies[2]])
        assert [r.client for r in summed.rejected] == [1]
        assert reason in summed.rejected[0].reason
        for name, value in without.update.items():
            assert torch.equal(summed.reply.update[name], value)
    # The range is that of all clients that are asked: who will answer is not known before.
    large = {**replies[1].update, first: replies[1].update[first] + 2.0**27}
    three = [replies[0], replace(replies[1], update=large), replies[2]]
    assert not sum_replies(task, task.initial_state, three).rejected
    (left,) = sum_replies(task, task.initial_state, three, asked=range(100)).rejected
    assert (left.client, "over 100 clients" in left.reason) == (1, True)
    path = next(iter(replies[0].stats))
    report = replies[0].stats[path]
    far = replace(report.moments, mean=report.moments.mean + 1e15)
    stats = {**replies[0].stats, path: replace(report, moments=far)}
    summed = sum_replies(task, task.initial_state, [replace(replies[0], stats=stats), *replies[1:]])
    assert f"a sum over the inputs of layer {path!r} is" in summed.rejected[0].reason


@pytest.mark.parametrize("minimum", [1, 3])
def test_the_sum_of_one_client_or_of_too_few_is_not_used(minimum):
    task = task_of("gn", DSGD)
    replies = collect_replies(task)[: max(1, minimum - 1)]
    with pytest.raises(NoUsableReplyError, match=f"only {len(replies)} usable repl"):
        sum_replies(task, task.initial_state, replies, minimum=minimum)
    with pytest.raises(NoUsableReplyError, match="it was not asked in this round"):
        sum_replies(task, task.initial_state, replies, asked=[7, 8])


def test_buffers_and_absent_momentum():
    """A buffer that none changes keeps its bits; whole numbers move by the mean, rounded."""
    before = {
        "same": torch.tensor([0.1, 1e30]),
        "scale": torch.tensor([1.0]),
        "calls": torch.tensor(2**60 + 1),
        "on": torch.tensor([True, False]),
    }
    like = {"w": torch.zeros(2)}
    expected = ReplySchema(like, buffers=before, momentum=like)
    encoding = Encoding(expected, 2, "values", {})
    one = small_reply(
        examples=3,
        buffers={**before, "scale": torch.tensor([2.0]), "calls": before["calls"] + 5},
        momentum={"w": torch.tensor([1.0, 2.0])},
    )
    two = small_reply(
        examples=1,
        update={"w": torch.tensor([1.25, 0.5])},
        buffers={**before, "calls": before["calls"] + 5, "on": torch.tensor([True, True])},
    )
    summed = encoding.decode(sum_plain(encoding, [one, two]), 2)
    assert torch.equal(summed.update["w"], torch.tensor([0.5, -1.0]))
    assert torch.equal(summed.momentum["w"], torch.tensor([1.0, 2.0]))
    assert torch.equal(summed.buffers["same"], before["same"])
    assert summed.buffers["scale"].tolist() == [1.75]
    assert int(summed.buffers["calls"]) == 2**60 + 6
    assert summed.buffers["on"].tolist() == [True, False]
    absent = sum_plain(encoding, [replace(one, momentum={}), two])
    assert encoding.decode(absent, 2).momentum == {}


def test_a_layer_that_some_clients_do_not_use_or_call_twice():
    running = {"bn": RunningStats(torch.tensor([1.0]), torch.tensor([4.0]), 5)}
    expected = ReplySchema({}, running=running)

    def moments(*values):
        return Moments.of(torch.tensor([[v] for v in values]))

    once = LayerStats(moments(0.0, 2.0), 6, samples=2.0)
    twice = LayerStats(moments(0.0, 2.0), 8, samples=2.0, more=(moments(4.0, 8.0),))
    replies = [
        small_reply(0, 2, update={}, stats={"bn": twice}),
        small_reply(1, 2, update={}, stats={}),
        small_reply(2, 2, update={}, stats={"bn": twice}),
    ]
    encoding = Encoding(expected, 3, "values", count_calls(replies, running))
    report = encoding.decode(sum_plain(encoding, replies), 3).stats["bn"]
    assert [(float(m.mean), float(m.var), m.count) for m in report.calls] == [
        (1.0, 1.0, 4.0),
        (6.0, 4.0, 4.0),
    ]
    assert report.num_batches == 8
    mixed = [*replies[:2], small_reply(2, 2, update={}, stats={"bn": once})]
    encoding = Encoding(expected, 3, "values", count_calls(mixed, running))
    report = encoding.decode(sum_plain(encoding, mixed), 3).stats["bn"]
    # One client's calls count as one set of values, (0, 2, 4, 8), half as much each.
    assert (float(report.moments.mean), report.moments.count) == (2.25, 4.0)
    assert report.num_batches == 7  # the mean of 3 and 1 steps
    alone = [replace(replies[0], stats={}), *replies[1:]]  # its sum would be that client's
    encoding = Encoding(expected, 3, "values", count_calls(alone, running))
    assert encoding.decode(sum_plain(encoding, alone), 3).stats == {}
    unused = [replace(reply, stats={}) for reply in replies]
    assert encoding.decode(sum_plain(encoding, unused), 3).stats == {}


def test_unequal_steps_move_the_counter_by_their_mean():
    task = task_of(
        "fbn",
        FEDAVG,
        model=nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 4)).double(),
    )
    task = replace(task, secure=True)
    received = broadcast(task, task.initial_state)
    few, many = (replace(UNEQUAL, steps=steps).batches(i, 1) for i, steps in enumerate((1, 4)))
    replies = [client_round(task, received, ClientState(), own)[0] for own in (few, many)]
    state = server_round(
        task, task.initial_state, [sum_replies(task, task.initial_state, replies).reply]
    )
    assert isinstance(state, ServerState)
    assert [r.num_batches for r in state.running.values()] == [2]
