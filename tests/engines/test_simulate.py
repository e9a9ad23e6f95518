"""The loop over clients: what it holds."""

import weakref

from fednorm.algorithms import create_algorithm
from fednorm.engines.base import train_clients
from fednorm.engines.loop import rounds
from support import ToyClients, task_of


def test_replies_are_not_held_during_the_next_round():
    seen, alive = [], []

    def train(*args):
        alive.append([ref() is not None for ref in seen])
        results, answers = train_clients(*args)
        seen[:] = [weakref.ref(t) for reply, _ in results for t in reply.update.values()]
        return results, answers

    task = task_of("naive", create_algorithm("fedavg", lr=0.05), count=2)
    for result in rounds(task, ToyClients(), 2, train=train):
        assert all(ref() is not None for ref in seen)
        assert len(result.replies) == 3
        del result
    assert alive[0] == []
    assert alive[1]
    assert not any(alive[1])
