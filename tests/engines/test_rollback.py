"""A round after which the clients' losses explode is undone, and repeated without its cause."""

from dataclasses import replace

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.attacks import create_attack
from fednorm.attacks.adversary import Adversary
from fednorm.core.messages import ServerState
from fednorm.engines.base import Faults, train_clients
from fednorm.engines.loop import _Rollback, rounds
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, in_processes, task_of

CLIENTS = ToyClients(sizes=(5, 7, 4, 6, 5))
UNDO = Faults(rollback=True)
BAD = 3  # the round in which clients lie


def make_task(name="naive", **fields):
    task = task_of(name, create_algorithm("fedavg", lr=0.05), **fields)
    return replace(task, outlier_factor=0.0)  # nothing else stops them


def lying(task, liars, factor):
    def change(reply):
        return replace(reply, update={n: factor * t for n, t in reply.update.items()})

    def train(received, client_states, batches):
        results, answers = train_clients(task, received, client_states, batches)
        lies = liars if received.round == BAD else ()
        return [(change(r) if r.client in lies else r, kept) for r, kept in results], answers

    return train


def run(task, liars, *, faults, factor=-1e5, count=5):
    return list(rounds(task, CLIENTS, count, train=lying(task, liars, factor), faults=faults))


def assert_equal(one, other):
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name])
    for path, running in one.running.items():
        assert torch.equal(running.mean, other.running[path].mean)
        assert torch.equal(running.var, other.running[path].var)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "gn", "hbn"])
@pytest.mark.parametrize("liars", [(2,), (1, 4)])
def test_the_round_is_that_of_the_others(name, liars):
    task = make_task(name)
    results = run(task, liars, faults=UNDO)
    assert [[one.client for one in r.rejected] for r in results] == [[], [], [*liars], [], []]
    assert "with it the median loss of clients is" in results[BAD - 1].rejected[0].reason
    others = replace(CLIENTS, absent={BAD: liars})
    *_, honest = rounds(task, others, BAD)
    assert_equal(results[BAD - 1].state, honest.state)


@pytest.mark.slow
def test_without_it_the_run_is_lost():
    task = make_task()
    lost, kept = (run(task, (2,), faults=faults)[-1] for faults in (Faults(), UNDO))
    assert kept.train_loss < 3
    assert lost.train_loss > 10 * kept.train_loss


@pytest.mark.slow
def test_honest_rounds_stay_as_they_are():
    task = make_task("fbn")
    plain, watched = (run(task, (), faults=faults)[-1] for faults in (Faults(), UNDO))
    assert_equal(plain.state, watched.state)
    assert not watched.rejected


@pytest.mark.slow
def test_a_round_that_no_minority_spoils_is_undone(caplog):
    task = make_task()
    results = run(task, (0, 1, 2), faults=UNDO)
    losses = [result.train_loss for result in results]
    assert "round 3 is undone" in caplog.text
    assert results[BAD - 1].state.round == BAD
    assert max(losses) < 3
    assert_equal(results[BAD - 1].state, results[BAD - 2].state)


def test_slow_growth_is_noticed_and_undone_to_a_state_before_it():
    """Each round is less than twice as bad as the one before."""
    losses = [1.0, 1.9, 3.6, 6.8]
    kept = [ServerState(i, {}, {}, {}, momentum={"round": torch.tensor(i)}) for i in range(3)]
    undo = _Rollback(lambda _: kept[0], lambda state: losses[state.round], kept[0], kept)
    found = undo.check(ServerState(3, {}, {}, {}), [])
    assert (found.round, int(found.momentum["round"])) == (3, 1)


@pytest.mark.slow
def test_processes_give_the_bits_of_the_loop():
    task = make_task()
    adversary = Adversary(create_attack("replacement", scale=-1e5), frozenset({1}), "updates")
    faults = replace(UNDO, adversary=adversary)
    *_, alone = rounds(task, CLIENTS, 3, faults=faults)
    *_, shared = in_processes(task, CLIENTS, 3, faults=faults)
    assert [one.client for one in alone.rejected] == [1]
    assert alone.rejected == shared.rejected
    assert_equal(alone.state, shared.state)


def test_the_merged_engine_is_refused():
    experiment = build_experiment({"strategies": ["fbn"], "rollback": True, "engine": "merged"})
    with pytest.raises(ConfigError, match="clients that all are honest and answer"):
        prepare(experiment, experiment.strategies[0], 0)


@pytest.mark.flower
def test_nodes_are_refused():
    experiment = build_experiment({"strategies": ["fbn"], "rollback": True, "engine": "flower"})
    with pytest.raises(ConfigError, match="engine 'flower' cannot roll back"):
        prepare(experiment, experiment.strategies[0], 0)
