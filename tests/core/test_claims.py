"""What one client may claim: beyond it, its reply is rejected by name and changes nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Claim, LayerStats, LayerUse, Reply
from fednorm.core.moments import Moments
from fednorm.core.replies.plausibility import Quantity, find_outliers, measure_statistics
from fednorm.engines.base import train_clients
from fednorm.engines.loop import rounds
from fednorm.errors import NoUsableReplyError
from support import ToyClients, nested_model, task_of

LIAR = 2


def lying(task, change, first=1, liars=(LIAR,)):
    """Return a training function under which liars change their replies, from a round on."""

    def train(received, client_states, batches):
        results, answers = train_clients(task, received, client_states, batches)
        lie = received.round >= first
        return [
            (change(reply) if lie and reply.client in liars else reply, kept)
            for reply, kept in results
        ], answers

    return train


def run(task, clients, change, count=1, **about):
    *_, result = rounds(task, clients, count, train=lying(task, change, **about))
    return result


def tensors_of(state):
    yield from (*state.weights.values(), *state.buffers.values(), *state.momentum.values())
    for running in state.running.values():
        yield from (running.mean, running.var, torch.tensor(running.num_batches))


def assert_rejected(task, clients, change, reason):
    """The liar is named, and the round is that of the others."""
    result = run(task, clients, change)
    assert [one.client for one in result.rejected] == [LIAR]
    assert reason in result.rejected[0].reason
    honest = replace(clients, absent={1: [LIAR]})
    *_, without = rounds(task, honest, 1)
    assert all(map(torch.equal, tensors_of(result.state), tensors_of(without.state)))


def in_layer(path="stem.1", **moments):
    """Return a change of one layer's moments; values are tensors or functions of the true ones."""

    def change(reply):
        report = reply.stats[path]
        new = {k: v(getattr(report.moments, k)) for k, v in moments.items()}
        report = replace(report, moments=replace(report.moments, **new))
        return replace(reply, stats={**reply.stats, path: report})

    return change


def with_report(path="stem.1", **values):
    def change(reply):
        report = reply.stats[path]
        new = {k: v(getattr(report, k)) for k, v in values.items()}
        return replace(reply, stats={**reply.stats, path: replace(report, **new)})

    return change


DSGD = {"algorithm": create_algorithm("dsgd", lr=0.05)}
FEDAVG = {"algorithm": create_algorithm("fedavg", lr=0.05)}


@pytest.mark.parametrize(("name", "about"), [("fbn", DSGD), ("naive", FEDAVG), ("gn", FEDAVG)])
@pytest.mark.parametrize("factor", [2**40, 2])
def test_more_examples_than_the_client_holds_are_rejected(name, about, factor):
    clients = ToyClients(sizes=(5, 7, 4, 6), steps=1)
    assert_rejected(
        task_of(name, **about),
        clients,
        lambda reply: replace(reply, examples=reply.examples * factor),
        f"it reports {4 * factor} examples, but can have 4 at most",
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_a_counter_that_jumps_is_rejected(steps):
    clients = ToyClients(sizes=(5, 7, 4, 6), steps=steps)
    task = task_of("fbn", **FEDAVG, stats_momentum=None)
    assert_rejected(
        task,
        clients,
        with_report(num_batches=lambda n: n + 2**30),
        f"the counter of layer 'stem.1' is {2**30 + steps} after 0",
    )


def test_a_count_of_more_samples_than_a_batch_has_is_rejected():
    clients = ToyClients(sizes=(5, 7, 4, 6))
    assert_rejected(
        task_of("fbn", **DSGD),
        clients,
        with_report(samples=lambda n: 100 * n),
        "the samples of layer 'stem.1' are 400.0, but 4 at most",
    )


def test_a_count_of_more_values_than_others_find_in_a_sample_is_rejected():
    clients = ToyClients(sizes=(5, 7, 4, 6))
    assert_rejected(
        task_of("fbn", **DSGD),
        clients,
        in_layer(count=lambda _: 2.0**53),
        "values of layer 'stem.1' in a sample",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fbn", "naive", "feddna", "dualbn"])
@pytest.mark.parametrize(
    "change",
    [
        in_layer(mean=lambda mean: mean + 1e18),
        in_layer(var=lambda var: var + 1e30),
        in_layer(var=lambda var: var + 1e300),
    ],
)
def test_outrageous_statistics_are_rejected(name, change):
    clients = ToyClients(sizes=(5, 7, 4, 6))
    assert_rejected(task_of(name, **DSGD), clients, change, "the inputs of layer 'stem.1'")


@pytest.mark.parametrize("name", ["naive", "gn"])
@pytest.mark.parametrize("about", [DSGD, FEDAVG])
def test_an_outrageous_update_is_rejected(name, about):
    clients = ToyClients(sizes=(5, 7, 4, 6))
    assert_rejected(
        task_of(name, **about),
        clients,
        lambda reply: replace(reply, update={n: t + 1e30 for n, t in reply.update.items()}),
        "its update",
    )


def test_outrageous_momentum_is_rejected():
    clients = ToyClients(sizes=(5, 7, 4, 6))
    algorithm = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global")
    assert_rejected(
        task_of("naive", algorithm),
        clients,
        lambda reply: replace(reply, momentum={n: t + 1e30 for n, t in reply.momentum.items()}),
        "its momentum",
    )


@pytest.mark.parametrize("size", [1e30, float("nan"), float("inf")])
def test_an_outrageous_control_variate_is_rejected(size):
    """It would stay in the server's, and so in every client's gradients."""
    clients = ToyClients(sizes=(5, 7, 4, 6))
    assert_rejected(
        task_of("gn", create_algorithm("scaffold", lr=0.05)),
        clients,
        lambda reply: replace(reply, momentum={n: t + size for n, t in reply.momentum.items()}),
        "momentum" if size == 1e30 else "is not finite",
    )


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
@pytest.mark.parametrize("clients", [1e9, -1e9, float("nan"), float("inf"), "x", None, 2])
def test_a_client_is_one_client(name, clients):
    """Both algorithms add up changes of all clients by the number of those that replied."""
    assert_rejected(
        replace(task_of("gn", create_algorithm(name, lr=0.05)), clients=4),
        ToyClients(sizes=(5, 7, 4, 6)),
        lambda reply: replace(reply, clients=clients),
        f"it claims to combine {clients!r} clients",
    )


@pytest.mark.parametrize(
    ("steps", "momentum", "most"), [(3, 0.0, "3"), (1, 0.0, "1"), (3, 0.9, "5.61")]
)
@pytest.mark.parametrize("factor", [1.01, 9000.0, 0.1, 0.0, -1.0, -9000.0])
def test_a_weight_of_steps_that_a_client_cannot_have_taken_is_rejected(
    steps, momentum, most, factor
):
    assert_rejected(
        task_of("gn", create_algorithm("fednova", lr=0.05, momentum=momentum)),
        ToyClients(sizes=(5, 7, 4, 6), steps=steps),
        lambda reply: replace(reply, momentum={n: t * factor for n, t in reply.momentum.items()}),
        f"but must be from 1 to {most}",
    )


def test_an_outrageous_backward_mean_is_rejected():
    clients = ToyClients(sizes=(5, 7, 4, 6))
    task = task_of("dualbn", **DSGD)
    (path, *_) = (path for path in task.layout.sharing if "backward" in path)
    assert_rejected(task, clients, in_layer(path, mean=lambda mean: mean + 1e18), "layer")


def test_a_layer_that_is_called_twice_is_compared_by_its_largest_call():
    reply = Reply(0, 1, {}, {}, {"x": LayerStats(flat(1.0), 2, 1.0, (flat(5.0),))})
    assert measure_statistics(reply.stats)[Quantity("inputs", "x")] == pytest.approx(5.0)


def flat(mean, var=0.0, channels=3):
    return Moments(1.0, torch.full((channels,), mean), torch.full((channels,), var))


@pytest.mark.parametrize("size", [3.4e38, 1e30])
@pytest.mark.parametrize("name", ["feddna", "naive", "fbn"])
def test_the_merged_state_stays_finite_without_a_guard(name, size):
    task = replace(task_of(name, **DSGD, model=nested_model().float()), outlier_factor=0.0)
    clients = FloatClients(sizes=(5, 7, 4))
    result = run(task, clients, in_layer(var=lambda var: torch.full_like(var, size)))
    assert all(bool(tensor.isfinite().all()) for tensor in tensors_of(result.state))
    assert [one.client for one in result.rejected] in ([], [LIAR])
    if name == "feddna" and size > 1e38:
        assert "the variance of layer 'stem.1' is not finite" in result.rejected[0].reason


class FloatClients(ToyClients):
    def _batch(self, client, generator):
        x, y = super()._batch(client, generator)
        return x.float(), y


def sizes_of(*values, kind="update", where=""):
    return [{Quantity(kind, where): value} for value in values]


@pytest.mark.parametrize(
    ("values", "floor", "expected"),
    [
        ((1.0, 1e9), 0.0, [1]),  # of two the smaller one is the scale
        ((1.0, 1e9), 1e7, []),  # unless the server has a larger one
        ((0.0, 0.0, 0.0, 1.0), 0.01, []),  # the others have nothing left to learn
        ((0.0, 0.0, 0.0, 1.0), 0.0, [3]),
        ((1e30, 2e30, 1e38), 0.0, [2]),
        ((float("inf"), float("inf"), 1.0), 0.0, []),  # all diverge
        ((1e9,), 0.0, []),  # a single client is what there is
        ((1.0, 900.0, 1.0), 0.0, []),
        ((1.0, 1100.0, 1.0), 0.0, [1]),
        ((1e9, 1e9, 1.0), 0.0, []),  # a false reply that is small accuses nobody
    ],
)
def test_outliers(values, floor, expected):
    assert list(find_outliers(sizes_of(*values), 1000.0, lambda _: floor)) == expected
    inputs = sizes_of(*values, kind="inputs", where="bn")
    assert list(find_outliers(inputs, 10_000.0, lambda _: floor)) == expected


@pytest.mark.parametrize("about", [DSGD, FEDAVG])
@pytest.mark.parametrize("sizes", [(5, 7), (5, 7, 4)])
def test_a_client_among_others_that_do_not_move_is_no_outlier(about, sizes):
    task, clients = task_of("naive", **about), ToyClients(sizes=sizes)
    still = lambda reply: replace(  # noqa: E731 (as the others)
        reply, update={n: 1e-12 * t for n, t in reply.update.items()}
    )
    result = run(task, clients, still, liars=range(1, len(sizes)))
    assert not result.rejected


def test_a_client_with_values_in_channels_that_are_zero_elsewhere_is_no_outlier():
    task, clients = task_of("fbn", **DSGD), ToyClients(sizes=(5, 7, 4, 6))
    nothing = in_layer(mean=torch.zeros_like, var=torch.zeros_like)
    assert not run(task, clients, nothing, liars=(0, 1, 3)).rejected


def test_of_two_clients_the_one_with_a_false_update_is_rejected():
    task, clients = task_of("gn", **FEDAVG), ToyClients(sizes=(5, 7))
    result = run(
        task,
        clients,
        lambda reply: replace(reply, update={n: t + 1e12 for n, t in reply.update.items()}),
        liars=(0,),
    )
    assert [one.client for one in result.rejected] == [0]


def test_a_false_count_accuses_no_honest_client_of_two():
    task, clients = task_of("fbn", **DSGD), ToyClients(sizes=(5, 7))
    assert not run(task, clients, in_layer(count=lambda _: 1e-30), liars=(0,)).rejected


def test_a_buffer_that_one_client_makes_huge_is_rejected():
    task = task_of("naive", **DSGD, model=nn.Sequential(nested_model(), Level()))
    change = lambda reply: replace(  # noqa: E731 (as above)
        reply, buffers={name: value + 1e9 for name, value in reply.buffers.items()}
    )
    assert_rejected(task, ToyClients(sizes=(5, 7, 4, 6)), change, "the change of buffer '1.level'")


class Level(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return x


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn"])
def test_means_cannot_be_raised_step_by_step(name):
    """Each round 500 times as large as what the server has, which it follows."""
    task, clients = task_of(name, **DSGD), ToyClients(sizes=(5, 7, 4, 6))

    def train(received, client_states, batches):
        results, answers = train_clients(task, received, client_states, batches)
        largest = float(received.state.running["stem.1"].mean.abs().max()) + 1
        raise_mean = in_layer(mean=lambda mean: mean + 500 * largest)
        return [(raise_mean(r) if r.client == LIAR else r, kept) for r, kept in results], answers

    results = list(rounds(task, clients, 8, train=train))
    means = [float(result.state.running["stem.1"].mean.abs().max()) for result in results]
    assert max(means) < 1e4  # 1e17 if the scale is raised along
    assert results[-1].rejected


def test_a_client_with_many_more_batches_than_others_is_no_outlier():
    task, clients = task_of("naive", **FEDAVG), ToyClients(sizes=(5, 7, 4, 6))
    assert not run(task, clients, in_layer(count=lambda count: 5000 * count)).rejected


def test_robust_rules_see_all_replies():
    median = create_aggregator("median", f=1)
    task = replace(task_of("fbn", **DSGD), aggregator=median, statistics_aggregator=median)
    huge = lambda reply: replace(  # noqa: E731 (as above)
        in_layer(var=lambda var: var + 1e30)(reply),
        update={n: t + 1e30 for n, t in reply.update.items()},
    )
    assert not run(task, ToyClients(sizes=(5, 7, 4, 6)), huge).rejected


def test_own_loops_declare_what_a_client_may_claim():
    task, clients = task_of("fbn", **DSGD), ToyClients(sizes=(5, 7))
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in (0, 1)
    ]
    claims = {0: Claim(examples=5), 1: Claim(examples=7, layers={"stem.1": LayerUse(64.0)})}
    assert not server_round(task, task.initial_state, replies, asked=claims).rejected
    claims = {0: Claim(examples=4), 1: Claim(examples=7, layers={"stem.1": LayerUse(63.0)})}
    with pytest.raises(NoUsableReplyError) as caught:
        server_round(task, task.initial_state, replies, asked=claims)
    assert [one.reason for one in caught.value.rejected] == [
        "it reports 5 examples, but can have 4 at most",
        "the count of layer 'stem.1' is 448.0, but 441.0 at most",
    ]
